data "aws_instances" "learner" {
  instance_tags        = merge(local.tags, { Role = "learner" })
  instance_state_names = ["pending", "running"]

  depends_on = [aws_autoscaling_group.host]
}

output "tensorboard_url" {
  description = "Address of TensorBoard, reachable from admin_cidrs. It changes if the learner's host is replaced. To see the new address, run terraform apply -refresh-only or apex cluster list."
  value       = try("http://${concat(data.aws_instances.learner.public_ips, data.aws_instances.learner.private_ips)[0]}:6006", "no learner host yet: apex cluster list shows it")
}

output "groups" {
  description = "Names of the auto-scaling groups by kind of host."
  value       = { for kind, group in aws_autoscaling_group.host : kind => group.name }
}

output "security_group_ids" {
  description = "Ids of the security groups by kind of host."
  value       = { for kind, group in aws_security_group.host : kind => group.id }
}

output "vpc_id" {
  description = "Id of the VPC of the hosts."
  value       = local.vpc_id
}

output "subnet_ids" {
  description = "Ids of the subnets by kind of host."
  value       = local.subnets
}

output "host_policies" {
  description = "Permissions that each kind of host needs, for profiles of your own (instance_profiles)."
  value       = { for kind, policy in data.aws_iam_policy_document.host : kind => policy.json }
}

output "checkpoints" {
  description = "Location of checkpoints and curves. terraform destroy keeps them."
  value       = "s3://${var.bucket}/${var.name}/"
}
