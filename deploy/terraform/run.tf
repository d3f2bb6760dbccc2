# Values that the first apply fixes for the whole run: the number of actors, the commit of both images, the zone and the
# start time of the cluster. Later applies keep them, so that new hosts match the others.

resource "terraform_data" "run" {
  input = {
    num_actors = var.num_actors > 0 ? var.num_actors : var.actor_hosts * local.streams_per_host
    commit     = coalesce(var.image_commit, data.aws_ami.newest.tags["Commit"])
    zone       = var.availability_zone != null ? var.availability_zone : try(local.zones[0], null)
    begun      = plantimestamp()
  }

  lifecycle {
    ignore_changes = [input]

    precondition {
      condition     = var.availability_zone != null || length(local.zones) > 0
      error_message = "No zone of ${var.region} offers all instance types. Choose other instance types, or set availability_zone."
    }

    precondition {
      condition     = anytrue([for gpu in data.aws_ec2_instance_type.of[var.learner_instance_type].gpus : gpu.manufacturer == "NVIDIA"])
      error_message = "learner_instance_type must have an NVIDIA GPU, such as g6.2xlarge; ${var.learner_instance_type} has none."
    }

    precondition {
      condition     = length(distinct([for type in var.actor_instance_types : data.aws_ec2_instance_type.of[type].default_vcpus])) == 1
      error_message = "actor_instance_types must all have the same number of cores, as in c7i.2xlarge and m7i.2xlarge: every host runs the same number of streams."
    }
  }
}

locals {
  run = terraform_data.run.input
  end = timeadd(local.run.begun, "${var.max_hours}h")
}

check "ladder" {
  assert {
    condition     = var.actor_hosts * local.streams_per_host <= local.run.num_actors
    error_message = "actor_hosts = ${var.actor_hosts} could run ${var.actor_hosts * local.streams_per_host} actors, but this run has num_actors = ${local.run.num_actors}: additional hosts wait until another host leaves."
  }
}

resource "aws_ssm_parameter" "max_hours" { # Hosts read it every minute, so max_hours can change while they run.
  #checkov:skip=CKV_AWS_337:a number of hours is not secret
  #checkov:skip=CKV2_AWS_34:a number of hours is not secret
  name  = "/apex/${var.name}/max-hours"
  type  = "String"
  value = var.max_hours
  tags  = { Role = "cluster" }
}

# The images of deploy/packer in this account. The newest GPU image determines the commit; both images must have it.
data "aws_ami" "newest" {
  most_recent = true
  owners      = ["self"]

  dynamic "filter" {
    for_each = { Project = local.tags.Project, Role = "gpu" }

    content {
      name   = "tag:${filter.key}"
      values = [filter.value]
    }
  }
}

data "aws_ami" "image" {
  for_each = toset(["cpu", "gpu"])

  most_recent = true
  owners      = ["self"]

  dynamic "filter" {
    for_each = { Project = local.tags.Project, Role = each.key, Commit = local.run.commit }

    content {
      name   = "tag:${filter.key}"
      values = [filter.value]
    }
  }
}

data "aws_ec2_instance_type" "of" {
  for_each = toset(local.types)

  instance_type = each.key

  lifecycle {
    postcondition {
      condition     = contains(self.supported_architectures, "x86_64")
      error_message = "${each.key} is not an x86-64 instance type, which the images require. Choose one such as c7i.2xlarge."
    }
  }
}

data "aws_ec2_instance_type_offerings" "zones" {
  location_type = "availability-zone"

  filter {
    name   = "instance-type"
    values = local.types
  }
}

locals {
  types = distinct(concat(
    [var.learner_instance_type, var.evaluator_instance_type], var.actor_instance_types,
    var.replay_host == "own" ? [var.replay_instance_type] : [],
  ))

  offers = {
    for i, zone in data.aws_ec2_instance_type_offerings.zones.locations :
    zone => data.aws_ec2_instance_type_offerings.zones.instance_types[i]...
  }
  zones = [
    for zone, types in local.offers : zone
    if alltrue([for host in values(local.hosts) : length(setintersection(types, host.types)) > 0])
  ]

  actor_cores      = data.aws_ec2_instance_type.of[var.actor_instance_types[0]].default_vcpus
  streams_per_host = local.actor_cores * var.streams_per_core
  replay_bytes     = try(data.aws_ec2_instance_type.of[var.replay_instance_type].memory_size, 0) * 1024 * 1024
}
