data "aws_instances" "learner" {
  instance_tags        = merge(local.tags, { Role = "learner" })
  instance_state_names = ["pending", "running"]

  depends_on = [aws_autoscaling_group.host]
}

output "tensorboard_url" {
  description = "Address of TensorBoard, reachable from admin_cidrs. It changes if the learner's host is replaced. To see the new address, run terraform apply -refresh-only or apex cluster list."
  value       = try("http://${data.aws_instances.learner.public_ips[0]}:6006", "no learner host yet: apex cluster list shows it")
}

output "actor_group" {
  description = "Name of the auto-scaling group of the actor hosts."
  value       = aws_autoscaling_group.host["actor"].name
}

output "checkpoints" {
  description = "Location of checkpoints and curves. terraform destroy keeps them."
  value       = "s3://${var.bucket}/${var.name}/"
}
