# The hosts: one auto-scaling group for each kind, which replaces lost hosts. A new learner's host restores the run from
# the bucket. Terraform sets the minimum and maximum size of a group. The AWS CLI changes the size, and the end of the run
# sets it to 0.

locals {
  prefix = "apex-${var.name}"
  tags   = { Project = "apex-zeromq", Cluster = var.name }

  kinds = {
    learner = {
      roles = concat(["learner"], var.replay_host == "own" ? [] : ["replay"], var.evaluator_host == "own" ? [] : ["evaluator"])
      types = var.learner_instance_types, size = 1, spot = var.learner_spot
    }
    replay    = { roles = ["replay"], types = [var.replay_instance_type], size = 1, spot = false }
    evaluator = { roles = ["evaluator"], types = [var.evaluator_instance_type], size = 1, spot = false }
    actor     = { roles = ["actor"], types = var.actor_instance_types, size = var.actor_hosts, spot = var.spot }
  }
  disk_gb = { # replay: three snapshots, each as large as half of the host's RAM
    learner = 200, replay = max(100, 20 + ceil(1.5 * local.replay_bytes / pow(1024, 3))), evaluator = 30, actor = 30
  }
  hosts = { for kind, host in local.kinds : kind => host if kind == "learner" || !contains(local.kinds.learner.roles, kind) }
}

resource "aws_launch_template" "host" {
  for_each = local.hosts

  name                   = "${local.prefix}-${each.key}"
  image_id               = data.aws_ami.image[local.image_kinds[each.key]].id
  instance_type          = local.types[each.key][0]
  key_name               = var.ssh_key_name
  vpc_security_group_ids = [aws_security_group.host[each.key].id]
  user_data              = local.user_data[each.key]
  ebs_optimized          = true
  update_default_version = true
  tags                   = merge(local.tags, { Name = "${local.prefix}-${each.key}", Role = each.key })

  # A host that has finished powers off, and EC2 terminates it. The learner's disk may have files that the bucket lacks, so
  # EC2 only stops the learner's host; the host terminates itself after a complete upload.
  instance_initiated_shutdown_behavior = each.key == "learner" ? "stop" : "terminate"

  iam_instance_profile {
    name = try(aws_iam_instance_profile.host[each.key].name, var.instance_profiles[each.key])
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = data.aws_ami.image[local.image_kinds[each.key]].root_device_name

    ebs {
      volume_type           = "gp3"
      volume_size           = local.disk_gb[each.key]
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = ["instance", "volume", "network-interface"]

    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { Name = "${local.prefix}-${each.key}", Role = each.key })
    }
  }

  lifecycle {
    precondition {
      condition     = contains(keys(data.aws_ami.image), local.image_kinds[each.key])
      error_message = "This account has no ${local.image_kinds[each.key]} image of commit ${local.run.commit} in ${local.region}. Build both images of this commit there with packer build (deploy/packer/README.md), or choose another image_commit."
    }

    precondition {
      condition     = length(local.user_data[each.key]) <= 21848 # in base64
      error_message = "settings: user data of the ${each.key} would have ${floor(length(local.user_data[each.key]) * 3 / 4)} bytes, and EC2 accepts 16384. Use fewer or shorter settings."
    }
  }
}

resource "aws_autoscaling_group" "host" {
  for_each = local.hosts

  name                      = "${local.prefix}-${each.key}"
  vpc_zone_identifier       = local.subnets[each.key]
  min_size                  = 0
  max_size                  = each.value.size
  desired_capacity          = each.value.size # initial size
  health_check_type         = "EC2"
  health_check_grace_period = 120
  capacity_rebalance        = each.key == "actor" && each.value.spot # There must never be two learners.

  # Spot hosts too: until the learner's host exists, a plan chooses another zone.
  wait_for_capacity_timeout = each.key == "learner" ? "10m" : "0"

  ignore_failed_scaling_activities = true # Without it, the wait ends at the first failure, and the group tries on.

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = each.value.spot ? 0 : 100
      on_demand_allocation_strategy            = "prioritized"
      spot_allocation_strategy                 = "price-capacity-optimized"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.host[each.key].id
        version            = aws_launch_template.host[each.key].latest_version
      }

      dynamic "override" {
        for_each = local.types[each.key]

        content {
          instance_type = override.value
        }
      }
    }
  }

  dynamic "tag" {
    for_each = merge(local.tags, { Name = "${local.prefix}-${each.key}", Role = each.key })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  lifecycle {
    ignore_changes       = [desired_capacity]
    replace_triggered_by = [terraform_data.subnet] # Terraform must remove the hosts before their subnet.
  }

  depends_on = [ # Hosts need these at the first boot, to publish keys, and when they are destroyed, to upload the run.
    aws_iam_role_policy.host,
    aws_route.out,
    aws_route_table_association.this,
    aws_vpc_endpoint.s3,
    aws_vpc_security_group_egress_rule.aws,
  ]
}

locals { # The learner gets one more hour for its last upload.
  ends = { for kind in keys(local.hosts) : kind => timeadd(local.run.begun, "${kind == "learner" ? var.max_hours + 1 : var.max_hours}h") }
}

# Ends the cluster after max_hours even if no host does. AWS removes an action that has run, and refuses one in the past.
resource "aws_autoscaling_schedule" "end" {
  for_each = { for kind, end in local.ends : kind => end if timecmp(end, plantimestamp()) > 0 }

  scheduled_action_name  = "${local.prefix}-${each.key}-max-hours"
  autoscaling_group_name = aws_autoscaling_group.host[each.key].name
  start_time             = each.value
  min_size               = 0
  max_size               = -1 # unchanged
  desired_capacity       = 0

  lifecycle {
    replace_triggered_by = [aws_autoscaling_group.host[each.key].arn] # AWS removes the actions of a removed group.
  }
}
