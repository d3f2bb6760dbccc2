locals {
  prefix = "apex-${var.name}"
  roles  = ["replay", "learner", "evaluator", "actor"]
  tags   = { Project = "apex-zeromq", Cluster = var.name }

  # Fixed, so that a host which is replaced is found where the one before it was. AWS keeps the first four of a subnet.
  address = {
    replay    = cidrhost(var.vpc_cidr, 10)
    learner   = cidrhost(var.vpc_cidr, 11)
    evaluator = cidrhost(var.vpc_cidr, 12)
  }

  # The names of types tell their cores in the families that variables.tf lets in: large 2, xlarge 4, 2xlarge 8 ...
  actor_size       = element(split(".", var.actor_instance_types[0]), 1)
  actor_cores      = local.actor_size == "large" ? 2 : 4 * tonumber(coalesce(trimsuffix(local.actor_size, "xlarge"), "1"))
  streams_per_host = local.actor_cores * var.streams_per_core
}
