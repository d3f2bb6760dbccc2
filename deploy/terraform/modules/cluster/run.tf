# Values that the first apply fixes for the whole run: the number of actors, the commit of both images, the region and the
# start time of the cluster. Later applies keep them, so that new hosts match the others. The check below names each
# variable that differs.

data "aws_region" "this" {}

resource "terraform_data" "region" {
  input = data.aws_region.this.id

  lifecycle {
    ignore_changes = [input]
  }
}

resource "terraform_data" "run" {
  input = {
    num_actors = var.num_actors > 0 ? var.num_actors : var.actor_hosts * local.streams_per_host
    commit     = coalesce(var.image_commit, try(data.aws_ami.newest[0].tags["Commit"], "none"))
    begun      = plantimestamp()
  }

  lifecycle {
    ignore_changes = [input]

    precondition {
      condition     = length(local.refusals) == 0
      error_message = join("\n\n", local.refusals)
    }

    precondition {
      condition     = alltrue([for types in values(local.types) : length(types) > 0])
      error_message = "${join(" and ", [for kind, types in local.types : kind if length(types) == 0])}: no instance type of this kind is offered in ${try(coalesce(join(", ", local.places)), "any zone that offers the others")}. Zones that offer all kinds: ${try(coalesce(join(", ", local.zones)), "none")}. Change availability_zone or subnet_ids, or choose other instance types."
    }

    precondition {
      condition     = !anytrue([for subnet in slice(data.aws_subnet.given, length(var.subnet_ids), length(data.aws_subnet.given)) : subnet.map_public_ip_on_launch])
      error_message = "private_subnet_ids must be subnets that give hosts no public addresses."
    }
  }
}

locals {
  run    = terraform_data.run.input
  region = terraform_data.region.input

  # A sentence for each mistake in the variables that is known before any resource exists.
  refusals = compact([
    local.region == data.aws_region.this.id ? "" : "This cluster is in ${local.region}, but the provider uses ${data.aws_region.this.id}, where Terraform does not find it. Set the provider's region to ${local.region}.",
    length(data.aws_ami.newest) == 1 ? "" : "This account has no image with a GPU in ${data.aws_region.this.id}. Build both images there with packer build: deploy/packer/README.md.",
    # Version 6 of the provider has another name for the region of the bucket.
    lookup(data.aws_s3_bucket.checkpoints, "bucket_region", data.aws_s3_bucket.checkpoints.region) == data.aws_region.this.id ? "" : "The bucket ${var.bucket} is not in ${data.aws_region.this.id}. Choose a bucket in the region of the cluster.",
    length(local.wrong_settings) == 0 ? "" : "settings: ${join("; ", local.wrong_settings)}. modules/cluster/settings.json lists the settings of a cluster and their values; the variables of Terraform set all others.",
    length(local.not_x86) == 0 ? "" : "The images require x86-64 instance types, such as c7i.2xlarge. Others: ${join(", ", local.not_x86)}.",
    local.gpu_quota >= local.learner_cores ? "" : "The learner's host needs ${local.learner_cores} vCPUs, but the account's quota of G and VT instances in ${data.aws_region.this.id} is ${local.gpu_quota} vCPUs. Request more (Service Quotas, Amazon EC2), or set check_quota = false.",
    length(local.without_gpu) == 0 ? "" : "learner_instance_types must have an NVIDIA GPU, as g6.2xlarge has. Without one: ${join(", ", local.without_gpu)}.",
    length(distinct([for type in local.offered.actor : data.aws_ec2_instance_type.of[type].default_vcpus])) <= 1 ? "" : "actor_instance_types must all have the same number of cores, as in c7i.2xlarge and m7i.2xlarge: every host runs the same number of streams.",
    local.actor_mib <= local.memory_mib.actor ? "" : "An actor host needs about ${local.actor_mib} MiB of memory for ${local.streams_per_host} streams, but the smallest of actor_instance_types has ${local.memory_mib.actor} MiB. Choose larger types, or a lower streams_per_core.",
    local.replay_mib <= local.memory_mib[local.kind_of["replay"]] ? "" : "The replay memory needs a host with ${local.replay_mib} MiB of memory, but the host of the replay server has ${local.memory_mib[local.kind_of["replay"]]} MiB. Choose a larger ${var.replay_host == "own" ? "replay_instance_type" : "type in learner_instance_types"}, or set a lower settings.replay.capacity or max_bytes.",
    var.num_actors == 0 || var.num_actors > (var.actor_hosts - 2) * local.streams_per_host ? "" : "num_actors = ${var.num_actors}, but ${var.actor_hosts} actor hosts run ${var.actor_hosts * local.streams_per_host} actors: more than one host would cost money and wait. Choose a larger num_actors or fewer actor_hosts.",
  ])
}

check "pinned" {
  assert {
    condition     = var.num_actors == 0 || var.num_actors == local.run.num_actors
    error_message = "num_actors = ${var.num_actors} has no effect: this run has ${local.run.num_actors} actors. Start a new run under a new name."
  }

  assert {
    condition     = coalesce(var.image_commit, local.run.commit) == local.run.commit
    error_message = "image_commit = ${coalesce(var.image_commit, "null")} has no effect: this run uses the images of ${local.run.commit}. Start a new run under a new name."
  }

  assert {
    condition     = var.availability_zone == null || contains(local.places, coalesce(var.availability_zone, "any"))
    error_message = "availability_zone = ${coalesce(var.availability_zone, "null")} has no effect: the learner runs, or has run, in ${join(", ", local.places)}, or subnet_ids determines the zone. Start a new run under a new name."
  }
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
  tags  = merge(local.tags, { Role = "cluster" })
}
