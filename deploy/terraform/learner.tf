# The learner: the GPU, the control socket, the curves and the checkpoints.

resource "aws_instance" "learner" {
  #checkov:skip=CKV_AWS_126:the roles measure themselves; detailed monitoring would bill for what nobody reads
  ami                                  = data.aws_ami.image["gpu"].id
  instance_type                        = var.learner_instance_type
  subnet_id                            = aws_subnet.this["fixed"].id
  private_ip                           = local.address.learner
  vpc_security_group_ids               = [aws_security_group.role["learner"].id]
  iam_instance_profile                 = aws_iam_instance_profile.role["learner"].name
  key_name                             = var.ssh_key_name
  user_data_base64                     = local.user_data["learner"]
  user_data_replace_on_change          = true
  ebs_optimized                        = true
  instance_initiated_shutdown_behavior = "stop" # Its disk may have what the bucket lacks; else it terminates itself.
  tags                                 = { Name = "${local.prefix}-learner", Role = "learner" }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_type           = "gp3"
    volume_size           = local.disk_gb.learner
    encrypted             = true
    delete_on_termination = true
    tags                  = merge(local.tags, { Name = "${local.prefix}-learner", Role = "learner" })
  }

  lifecycle {
    ignore_changes = [ami] # images.tf
  }

  depends_on = [ # Its first boot publishes a key. Destroyed before its way out, it still saves and uploads what it has.
    aws_iam_role_policy.role,
    aws_route.out,
    aws_route_table_association.this,
    aws_vpc_endpoint.s3,
    aws_vpc_security_group_egress_rule.aws,
  ]
}
