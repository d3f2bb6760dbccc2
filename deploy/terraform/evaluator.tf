# The evaluator, and TensorBoard for the whole cluster.

resource "aws_instance" "evaluator" {
  #checkov:skip=CKV_AWS_126:the roles measure themselves; detailed monitoring would bill for what nobody reads
  ami                                  = data.aws_ami.image["cpu"].id
  instance_type                        = var.evaluator_instance_type
  subnet_id                            = aws_subnet.this["fixed"].id
  private_ip                           = local.address.evaluator
  vpc_security_group_ids               = [aws_security_group.role["evaluator"].id]
  iam_instance_profile                 = aws_iam_instance_profile.role["evaluator"].name
  key_name                             = var.ssh_key_name
  user_data_base64                     = local.user_data["evaluator"]
  user_data_replace_on_change          = true
  ebs_optimized                        = true
  instance_initiated_shutdown_behavior = "terminate" # A host that is done powers itself off, and bills no more.
  tags                                 = { Name = "${local.prefix}-evaluator", Role = "evaluator" }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_type           = "gp3"
    volume_size           = local.disk_gb.evaluator
    encrypted             = true
    delete_on_termination = true
    tags                  = merge(local.tags, { Name = "${local.prefix}-evaluator", Role = "evaluator" })
  }

  lifecycle {
    ignore_changes = [ami] # images.tf
  }

  depends_on = [aws_iam_role_policy.role] # Its first boot publishes a key.
}
