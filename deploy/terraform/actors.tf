# Actors: a group that replaces whoever goes. Terraform sets its bounds; how many there are is for the cluster's owner
# (apex cluster resize) and for the end of the run, which sets it to 0.

locals {
  actor_group = "${local.prefix}-actors"
}

resource "aws_launch_template" "actor" {
  name                                 = local.actor_group
  image_id                             = data.aws_ami.image["cpu"].id
  instance_type                        = var.actor_instance_types[0]
  key_name                             = var.ssh_key_name
  vpc_security_group_ids               = [aws_security_group.role["actor"].id]
  user_data                            = local.user_data["actor"]
  ebs_optimized                        = true
  instance_initiated_shutdown_behavior = "terminate"
  update_default_version               = true
  tags                                 = { Name = local.actor_group, Role = "actor" }

  iam_instance_profile {
    name = aws_iam_instance_profile.role["actor"].name
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = data.aws_ami.image["cpu"].root_device_name

    ebs {
      volume_type           = "gp3"
      volume_size           = local.disk_gb.actor
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = ["instance", "volume", "network-interface"]

    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { Name = local.actor_group, Role = "actor" })
    }
  }

  lifecycle {
    ignore_changes = [image_id] # images.tf
  }
}

resource "aws_autoscaling_group" "actors" {
  name                      = local.actor_group
  vpc_zone_identifier       = [aws_subnet.this["actors"].id]
  min_size                  = 0
  max_size                  = var.actor_hosts
  desired_capacity          = var.actor_hosts # at the beginning
  health_check_type         = "EC2"
  health_check_grace_period = 120
  capacity_rebalance        = var.spot
  wait_for_capacity_timeout = "0" # Spot capacity may come later; nothing waits for it.
  force_delete              = true

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = var.spot ? 0 : 100
      on_demand_allocation_strategy            = "prioritized"
      spot_allocation_strategy                 = "price-capacity-optimized"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.actor.id
        version            = aws_launch_template.actor.latest_version
      }

      dynamic "override" {
        for_each = var.actor_instance_types

        content {
          instance_type = override.value
        }
      }
    }
  }

  dynamic "tag" {
    for_each = merge(local.tags, { Name = local.actor_group, Role = "actor" })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  lifecycle {
    ignore_changes = [desired_capacity]
  }

  depends_on = [aws_iam_role_policy.role]
}

# The end that needs no host: a group whose learner died would otherwise replace every host that max_hours ends.
resource "terraform_data" "max_hours" {
  input = var.max_hours
}

resource "aws_autoscaling_schedule" "end" {
  count = var.end_schedule ? 1 : 0

  scheduled_action_name  = "max-hours"
  autoscaling_group_name = aws_autoscaling_group.actors.name
  start_time             = timeadd(timestamp(), "${var.max_hours}h")
  min_size               = 0
  max_size               = -1 # stays
  desired_capacity       = 0

  lifecycle {
    ignore_changes       = [start_time]
    replace_triggered_by = [terraform_data.max_hours]
  }
}
