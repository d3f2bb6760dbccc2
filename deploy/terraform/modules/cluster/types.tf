# Instance types: what each has, which zones offer it, and whether it has enough memory.

data "aws_ec2_instance_type" "of" {
  for_each = toset(flatten(values(local.offered)))

  instance_type = each.key
}

data "aws_ec2_instance_type_offerings" "zones" {
  location_type = "availability-zone"

  filter {
    name   = "instance-type"
    values = distinct(flatten(values(local.hosts)[*].types))
  }
}

locals {
  # The types of each kind that the region offers: EC2 refuses to describe others.
  offered = { for kind, host in local.hosts : kind => [for type in host.types : type if contains(data.aws_ec2_instance_type_offerings.zones.instance_types, type)] }

  offers = {
    for i, zone in data.aws_ec2_instance_type_offerings.zones.locations :
    zone => data.aws_ec2_instance_type_offerings.zones.instance_types[i]...
  }
  zones = [
    for zone, types in local.offers : zone
    if alltrue([for host in values(local.hosts) : length(setintersection(types, host.types)) > 0])
  ]

  # The types of each kind that are offered where its hosts are, in order of preference.
  types = { for kind, host in local.hosts : kind => [for type in host.types : type if contains(flatten([for zone in local.places : try(local.offers[zone], [])]), type)] }

  not_x86          = [for name, type in data.aws_ec2_instance_type.of : name if !contains(type.supported_architectures, "x86_64")]
  without_gpu      = [for type in local.offered.learner : type if !contains(data.aws_ec2_instance_type.of[type].gpus[*].manufacturer, "NVIDIA")]
  learner_cores    = max(0, [for type in local.offered.learner : data.aws_ec2_instance_type.of[type].default_vcpus]...)
  gpu_quota        = try(coalesce(data.aws_servicequotas_service_quota.gpu[0].value, data.aws_servicequotas_service_quota.gpu[0].default_value), local.learner_cores)
  actor_cores      = try(data.aws_ec2_instance_type.of[local.offered.actor[0]].default_vcpus, 1)
  streams_per_host = local.actor_cores * var.streams_per_core
  memory_mib       = { for kind, host in local.hosts : kind => try(min([for type in local.offered[kind] : data.aws_ec2_instance_type.of[type].memory_size]...), 1e9) } # none offered: refused for that
  replay_bytes     = var.replay_host == "own" ? local.memory_mib.replay * 1024 * 1024 : 0

  # 132 MiB for each process and 1.75 MiB for each stream (apex/launch/preflight/requirements.py), 1 GiB for the system.
  actor_mib = 1024 + local.actor_cores * (132 + ceil(1.75 * var.streams_per_core))

  # An Atari transition takes 1.5 KB, and the replay memory at most half of the RAM unless max_bytes is set.
  replay_mib = ceil(
    try(tonumber(var.settings.replay.max_bytes), 0) > 0 ? tonumber(var.settings.replay.max_bytes) / 1048576 :
    startswith(var.environment, "ALE/") ? 2 * 1500 * try(tonumber(var.settings.replay.capacity), 2000000) / 1048576 : 0
  )
}

data "aws_servicequotas_service_quota" "gpu" {
  count = var.check_quota && alltrue([for type in var.learner_instance_types : startswith(type, "g")]) ? 1 : 0

  service_code = "ec2"
  quota_code   = var.learner_spot ? "L-3819A6DF" : "L-DB2E81BA"
}
