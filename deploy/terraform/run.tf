# What the first apply decides for the whole run: the length of the epsilon ladder, the commit of both images, the zone,
# and when the cluster began. Later applies keep it, so that a replaced host fits the others.

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
      error_message = "No zone of ${var.region} offers all instance types. Set availability_zone or other types."
    }

    precondition {
      condition     = anytrue([for gpu in data.aws_ec2_instance_type.of[var.learner_instance_type].gpus : gpu.manufacturer == "NVIDIA"])
      error_message = "learner_instance_type must have an NVIDIA GPU, as in g6.2xlarge; ${var.learner_instance_type} has none."
    }

    precondition {
      condition     = length(distinct([for type in var.actor_instance_types : data.aws_ec2_instance_type.of[type].default_vcpus])) == 1
      error_message = "actor_instance_types must have equally many cores, as in c7i.2xlarge and m7i.2xlarge: every host runs as many streams."
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
    error_message = "actor_hosts = ${var.actor_hosts} could run ${var.actor_hosts * local.streams_per_host} actors, but this run has num_actors = ${local.run.num_actors}: further hosts wait until another leaves."
  }
}

resource "aws_ssm_parameter" "max_hours" { # Hosts read it every minute, so max_hours can change while they run.
  #checkov:skip=CKV_AWS_337:a number of hours is no secret
  #checkov:skip=CKV2_AWS_34:a number of hours is no secret
  name  = "/apex/${var.name}/max-hours"
  type  = "String"
  value = var.max_hours
  tags  = { Role = "cluster" }
}

# The images of deploy/packer in this account. The newest GPU image names the commit; both images are of that commit.
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
      error_message = "${each.key} is no x86-64 type, as c7i.2xlarge is: images and samplers need one."
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
