# What is refused at plan, and what is accepted. The provider is a mock: nothing is asked of AWS.
#
# A run takes as long as a plan, so each makes several claims. One that refuses has several variables wrong, each of which
# must be refused: Terraform checks them all, and a run fails unless all expected failures happen.

mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }

  mock_data "aws_ami_ids" {
    defaults = { ids = ["ami-2", "ami-1"] }
  }

  mock_data "aws_region" {
    defaults = { id = "us-east-1" }
  }

  mock_data "aws_s3_bucket" {
    defaults = { region = "us-east-1", bucket_region = "us-east-1" }
  }

  mock_data "aws_servicequotas_service_quota" {
    defaults = { value = 8 }
  }

  mock_data "aws_subnet" {
    defaults = { vpc_id = "vpc-1", availability_zone = "us-east-1c", map_public_ip_on_launch = false }
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
      locations      = ["us-east-1a", "us-east-1b", "us-east-1b", "us-east-1b", "us-east-1c", "us-east-1c", "us-east-1c", "us-east-1c"]
      instance_types = ["c7i.xlarge", "c7i.xlarge", "g5.2xlarge", "c6a.2xlarge", "c7i.xlarge", "g6.2xlarge", "c7i.2xlarge", "r7i.2xlarge"]
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
    condition     = aws_subnet.this[0].availability_zone == "us-east-1b"
    error_message = "The first zone that offers a type for each kind of hosts."
  }

  assert {
    condition     = [for override in aws_autoscaling_group.host["learner"].mixed_instances_policy[0].launch_template[0].override : override.instance_type] == ["g5.2xlarge"]
    error_message = "Only types that the zone offers."
  }
}

run "accepts_what_is_not_the_default" {
  command = plan

  variables {
    admin_cidrs       = ["203.0.113.0/24", "198.51.100.7/32"]
    num_actors        = 256
    budget_usd        = 50
    budget_email      = "somebody@example.org"
    replay_host       = "own"
    learner_spot      = true
    ssh_key_name      = "mine"
    availability_zone = "us-east-1c"
    image_commit      = "fedcba9"
    stall_minutes     = 0
    settings          = { checkpoint = { period_seconds = 86400 } }
  }

  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.admin) == 10
    error_message = "Two networks reach SSH on four kinds of hosts, and TensorBoard."
  }

  expect_failures = [check.ladder] # One host is spare: it waits until another one leaves.

  assert {
    condition     = local.run.num_actors == 256 && strcontains(local.toml.learner, "num_actors = 256")
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
    condition     = aws_subnet.this[0].availability_zone == "us-east-1c" && local.run.commit == "fedcba9"
    error_message = "Zone and commit may be given."
  }
}

run "refuses_no_admin_and_more" {
  command = plan

  variables {
    admin_cidrs = []
    actor_hosts = 0
    name        = "Pong 1"
    max_hours   = 0
    replay_host = "evaluator"
  }

  expect_failures = [var.admin_cidrs, var.actor_hosts, var.name, var.max_hours, var.replay_host]
}

run "refuses_the_whole_internet_and_more" {
  command = plan

  variables {
    admin_cidrs = ["203.0.113.7/32", "0.0.0.0/0"]
    name        = "pong-with-a-name-of-more-than-thirty"
  }

  expect_failures = [var.admin_cidrs, var.name]
}

run "refuses_an_address_without_a_length_and_more" {
  command = plan

  variables {
    admin_cidrs = ["203.0.113.7"]
    budget_usd  = 50
  }

  expect_failures = [var.admin_cidrs, var.budget_email]
}

run "refuses_ipv6_which_the_network_does_not_have_and_more" {
  command = plan

  variables {
    admin_cidrs            = ["203.0.113.7/32", "2001:db8::/48"]
    stall_minutes          = 9
    learner_instance_types = []
    private_subnet_ids     = ["subnet-2"]
    instance_profiles      = { actors = "mine" }
    evaluator_host         = "actor"
  }

  expect_failures = [
    var.admin_cidrs, var.stall_minutes, var.learner_instance_types, var.private_subnet_ids, var.instance_profiles, var.evaluator_host,
  ]
}

run "refuses_checkpoints_that_are_rarer_than_the_checks_of_progress" {
  command = plan

  variables {
    settings = { checkpoint = { period_seconds = 1801 } }
  }

  expect_failures = [var.stall_minutes]
}

run "refuses_a_learner_above_the_quota" {
  command = plan

  override_data {
    target = data.aws_servicequotas_service_quota.gpu
    values = { value = 4 }
  }

  expect_failures = [terraform_data.run]
}

run "refuses_long_user_data" {
  command = plan

  variables {
    settings = { learner = { init_from = join("", [for i in range(1000) : "0123456789abcdefgh"]) } }
  }

  expect_failures = [aws_launch_template.host]
}

run "uses_existing_subnets_and_profiles" {
  command = plan

  variables {
    subnet_ids         = ["subnet-1"]
    private_subnet_ids = ["subnet-2"]
    instance_profiles  = { actor = "mine" }
    evaluator_host     = "learner"
  }

  assert {
    condition     = length(aws_vpc.this) + length(aws_flow_log.refused) == 0 && alltrue([for group in aws_security_group.host : group.vpc_id == "vpc-1"])
    error_message = "The hosts are in the VPC of the subnets."
  }

  assert {
    condition     = { for kind, group in aws_autoscaling_group.host : kind => join(" ", group.vpc_zone_identifier) } == { actor = "subnet-2", learner = "subnet-1" }
    error_message = "The evaluator shares the learner's host, and actor hosts have no public addresses."
  }

  assert {
    condition     = aws_launch_template.host["actor"].iam_instance_profile[0].name == "mine" && keys(aws_iam_role.host) == ["learner"]
    error_message = "Only kinds without an existing profile get a role."
  }
}

run "refuses_private_subnets_with_public_addresses" {
  command = plan

  override_data {
    target = data.aws_subnet.given[1]
    values = { map_public_ip_on_launch = true }
  }

  variables {
    subnet_ids         = ["subnet-1"]
    private_subnet_ids = ["subnet-2"]
  }

  expect_failures = [terraform_data.run]
}

run "tries_the_next_zone_until_a_learner_has_run" {
  command = plan

  override_data {
    target = data.aws_subnets.earlier
    values = { ids = ["subnet-1"] }
  }

  override_data {
    target = data.aws_subnet.earlier
    values = { availability_zone = "us-east-1b" }
  }

  assert {
    condition     = aws_subnet.this[0].availability_zone == "us-east-1c"
    error_message = "The zone after that of the earlier apply."
  }
}

run "keeps_the_zone_in_which_a_learner_has_run" {
  command = plan

  override_data {
    target = data.aws_subnets.earlier
    values = { ids = ["subnet-1"] }
  }

  override_data {
    target = data.aws_subnet.earlier
    values = { availability_zone = "us-east-1b" }
  }

  override_data {
    target = data.aws_s3_objects.run
    values = { keys = ["pong-1/begun.json"] }
  }

  variables {
    availability_zone = "us-east-1c"
  }

  expect_failures = [check.pinned]

  assert {
    condition     = aws_subnet.this[0].availability_zone == "us-east-1b"
    error_message = "The zone in which the learner has run."
  }
}
