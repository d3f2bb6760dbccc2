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
  sizes = { for role, type in { actor = var.actor_instance_types[0], replay = var.replay_instance_type } : role => element(split(".", type), 1) }
  cores = { for role, size in local.sizes : role => size == "large" ? 2 : 4 * tonumber(coalesce(trimsuffix(size, "xlarge"), "1")) }

  actor_cores      = local.cores.actor
  streams_per_host = local.actor_cores * var.streams_per_core

  # And their memory: 8 GiB a core in the families r, 16 or more in x.
  replay_gib = local.cores.replay * (startswith(var.replay_instance_type, "x") ? 16 : 8)

  disk_gb = {
    replay    = max(100, 20 + 3 * local.replay_gib / 2) # three snapshots of half of the memory
    learner   = 200
    evaluator = 100
    actor     = 30
  }
}
