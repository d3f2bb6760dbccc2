data "aws_instances" "learner" {
  instance_tags        = merge(local.tags, { Role = "learner" })
  instance_state_names = ["pending", "running"]

  depends_on = [aws_autoscaling_group.host]
}

output "tensorboard_url" {
  description = "The curves, from admin_cidrs. After the learner's host was replaced: terraform apply -refresh-only, or apex cluster list."
  value       = try("http://${data.aws_instances.learner.public_ips[0]}:6006", "no learner host yet: apex cluster list shows it")
}

output "actor_group" {
  description = "The auto-scaling group of the actor hosts."
  value       = aws_autoscaling_group.host["actor"].name
}

output "checkpoints" {
  description = "Where checkpoints and curves are, and stay after destroy."
  value       = "s3://${var.bucket}/${var.name}/"
}
