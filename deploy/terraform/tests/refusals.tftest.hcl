# What is refused at plan, and what is accepted. The provider is a mock: nothing is asked of AWS.
#
# A run takes as long as a plan, so each makes several claims. One that refuses has several variables wrong, each of which
# must be refused: Terraform checks them all, and a run fails unless all expected failures happen.

mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }

  mock_data "aws_ami" {
    defaults = { tags = { Commit = "0123abc" }, root_device_name = "/dev/sda1" }
  }

  mock_data "aws_ec2_instance_type" {
    defaults = {
      supported_architectures = ["x86_64"]
      default_vcpus           = 8
      memory_size             = 32768
      gpus                    = [{ manufacturer = "NVIDIA", count = 1, memory_size = 22888, name = "L4" }]
    }
  }

  mock_data "aws_ec2_instance_type_offerings" {
    defaults = {
      locations      = ["us-east-1a", "us-east-1b", "us-east-1b", "us-east-1b", "us-east-1c", "us-east-1c", "us-east-1c"]
      instance_types = ["c7i.xlarge", "c7i.xlarge", "g6.2xlarge", "c6a.2xlarge", "c7i.xlarge", "g6.2xlarge", "c7i.2xlarge"]
    }
  }
}

variables {
  name        = "pong-1"
  admin_cidrs = ["203.0.113.7/32"]
  bucket      = "apex-checkpoints"
}

run "accepts_what_is_right" {
  command = plan

  assert {
    condition     = local.run.num_actors == 384 && aws_autoscaling_group.host["actor"].max_size == 3
    error_message = "3 hosts of 8 cores with 16 streams each make 384 actors."
  }

  assert {
    condition     = length(aws_budgets_budget.this) == 0
    error_message = "Without budget_usd there is no budget."
  }

  assert {
    condition     = join(" ", keys(aws_autoscaling_group.host)) == "actor evaluator learner" && alltrue([for group in aws_autoscaling_group.host : group.min_size == 0])
    error_message = "The replay server shares the learner's host, and every group can be set to 0."
  }

  assert {
    condition     = [for rule in aws_vpc_security_group_ingress_rule.admin : rule.from_port] == [6006]
    error_message = "Without a key pair, SSH is closed."
  }

  assert {
    condition     = aws_subnet.this.availability_zone == "us-east-1b"
    error_message = "The first zone that offers a type for each kind of hosts."
  }
}

run "accepts_what_is_not_the_default" {
  command = plan

  variables {
    admin_cidrs       = ["203.0.113.0/24", "198.51.100.7/32"]
    num_actors        = 3072
    budget_usd        = 50
    budget_email      = "somebody@example.org"
    replay_host       = "own"
    learner_spot      = true
    ssh_key_name      = "mine"
    availability_zone = "us-east-1f"
    image_commit      = "fedcba9"
    stall_minutes     = 0
    settings          = { checkpoint = { period_seconds = 86400 } }
  }

  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.admin) == 10
    error_message = "Two networks reach SSH on four kinds of hosts, and TensorBoard."
  }

  assert {
    condition     = local.run.num_actors == 3072 && strcontains(local.toml.learner, "num_actors = 3072")
    error_message = "num_actors is N."
  }

  assert {
    condition     = aws_budgets_budget.this[0].limit_amount == "50" && length(aws_budgets_budget.this[0].notification) == 2
    error_message = "E-mails at 80 and at 100 percent."
  }

  assert {
    condition     = strcontains(local.toml.learner, "host_bytes = ${32 * 1024 * 1024 * 1024}\n") && aws_launch_template.host["replay"].block_device_mappings[0].ebs[0].volume_size == 100
    error_message = "The replay memory is its host's, and the disk has room for three snapshots of half of it."
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.socket["batches-from-learner"].to_port == 21634
    error_message = "Every sampler process sends batches from a port of its own."
  }

  assert {
    condition     = aws_autoscaling_group.host["learner"].mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity == 0
    error_message = "The learner's host may be a spot instance."
  }

  assert {
    condition     = aws_subnet.this.availability_zone == "us-east-1f" && local.run.commit == "fedcba9"
    error_message = "Zone and commit may be given."
  }
}

run "refuses_no_admin_and_more" {
  command = plan

  variables {
    admin_cidrs = []
    actor_hosts = 0
    name        = "Pong 1"
    settings    = { transport = { control_port = 1 } }
    max_hours   = 0
    replay_host = "evaluator"
  }

  expect_failures = [var.admin_cidrs, var.actor_hosts, var.name, var.settings, var.max_hours, var.replay_host]
}

run "refuses_the_whole_internet_and_more" {
  command = plan

  variables {
    admin_cidrs = ["203.0.113.7/32", "0.0.0.0/0"]
    name        = "pong-with-a-name-of-more-than-thirty"
    settings    = { actor = { num_actors = 8 } }
  }

  expect_failures = [var.admin_cidrs, var.name, var.settings]
}

run "refuses_an_address_without_a_length_and_more" {
  command = plan

  variables {
    admin_cidrs = ["203.0.113.7"]
    settings    = { replay = { host_bytes = 8 } }
    budget_usd  = 50
  }

  expect_failures = [var.admin_cidrs, var.settings, var.budget_email]
}

run "refuses_ipv6_which_the_network_does_not_have_and_more" {
  command = plan

  variables {
    admin_cidrs   = ["203.0.113.7/32", "2001:db8::/48"]
    stall_minutes = 9
  }

  expect_failures = [var.admin_cidrs, var.stall_minutes]
}

run "refuses_checkpoints_that_are_rarer_than_the_checks_of_progress" {
  command = plan

  variables {
    settings = { checkpoint = { period_seconds = 1801 } }
  }

  expect_failures = [var.stall_minutes]
}

run "refuses_a_type_of_another_architecture" {
  command = plan

  override_data {
    target = data.aws_ec2_instance_type.of["c7gn.2xlarge"]
    values = { supported_architectures = ["arm64"] }
  }

  variables {
    actor_instance_types = ["c7gn.2xlarge"]
    availability_zone    = "us-east-1a"
  }

  expect_failures = [data.aws_ec2_instance_type.of]
}

run "refuses_a_learner_without_a_gpu" {
  command = plan

  override_data {
    target = data.aws_ec2_instance_type.of["c7i.4xlarge"]
    values = { gpus = [], default_vcpus = 16, supported_architectures = ["x86_64"] }
  }

  variables {
    learner_instance_type = "c7i.4xlarge"
    availability_zone     = "us-east-1a"
  }

  expect_failures = [terraform_data.run]
}

run "refuses_actor_hosts_of_different_sizes" {
  command = plan

  override_data {
    target = data.aws_ec2_instance_type.of["c7i.4xlarge"]
    values = { default_vcpus = 16, supported_architectures = ["x86_64"] }
  }

  variables {
    actor_instance_types = ["c7i.2xlarge", "c7i.4xlarge"]
  }

  expect_failures = [terraform_data.run]
}

run "refuses_types_that_no_zone_offers_together" {
  command = plan

  variables {
    learner_instance_type = "p5.48xlarge"
  }

  expect_failures = [terraform_data.run]
}
