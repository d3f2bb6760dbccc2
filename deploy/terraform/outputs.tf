output "tensorboard_url" {
  description = "The curves of the whole cluster, from admin_cidrs."
  value       = "http://${aws_instance.evaluator.public_ip}:6006"
}

output "addresses" {
  description = "Private addresses, which stay; the evaluator's, learner's and replay server's public ones may change."
  value = {
    private = local.address
    public = {
      replay    = aws_instance.replay.public_ip
      learner   = aws_instance.learner.public_ip
      evaluator = aws_instance.evaluator.public_ip
    }
  }
}

output "actor_group" {
  description = "The auto-scaling group of the actor hosts."
  value       = aws_autoscaling_group.actors.name
}

output "num_actors" {
  description = "N: streams, each with its own epsilon."
  value       = terraform_data.ladder.input
}

output "checkpoints" {
  description = "Where checkpoints and curves are, and stay after destroy."
  value       = "s3://${var.bucket}/${var.name}/"
}

output "bucket" {
  description = "The bucket, which is not the stack's."
  value       = var.bucket
}

output "log_groups" {
  description = "CloudWatch log groups, by role."
  value       = { for role, group in aws_cloudwatch_log_group.role : role => group.name }
}
