# What is refused at plan, and what is accepted. Nothing is asked of AWS: the provider is a stand-in.
#
# A run takes as long as a plan, so each has several claims. One that refuses has several variables wrong, each of which
# must be refused: Terraform looks at them all, and a run fails unless all that it expects do.

mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
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
    condition     = terraform_data.ladder.input == 384 && aws_autoscaling_group.actors.max_size == 3 && aws_autoscaling_group.actors.min_size == 0
    error_message = "3 hosts of 8 cores with 16 streams each make 384 actors."
  }

  assert {
    condition     = length(aws_budgets_budget.this) == 0
    error_message = "Without budget_usd there is no alarm."
  }
}

run "accepts_what_is_not_the_default" {
  command = plan

  variables {
    admin_cidrs           = ["203.0.113.0/24", "198.51.100.7/32"]
    num_actors            = 3072
    budget_usd            = 50
    budget_email          = "somebody@example.org"
    learner_instance_type = "p5.48xlarge"
    replay_instance_type  = "x8i.4xlarge"
    flow_logs             = false
    end_schedule          = false
  }

  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.admin) == 10
    error_message = "Two networks reach SSH on four roles, and TensorBoard."
  }

  assert {
    condition     = terraform_data.ladder.input == 3072 && strcontains(local.toml.learner, "num_actors = 3072")
    error_message = "num_actors is N."
  }

  assert {
    condition     = aws_budgets_budget.this[0].limit_amount == "50" && length(aws_budgets_budget.this[0].notification) == 2
    error_message = "Letters at 80 and at 100 percent."
  }

  assert {
    condition     = strcontains(local.toml.learner, "host_bytes = ${256 * 1024 * 1024 * 1024}\n") && aws_instance.replay.root_block_device[0].volume_size == 404
    error_message = "The replay memory is its host's, and the disk has room for three snapshots of half of it."
  }

  assert {
    condition     = length(aws_flow_log.refused) + length(aws_iam_role.flow_logs) + length(aws_cloudwatch_log_group.refused) + length(aws_autoscaling_schedule.end) == 0
    error_message = "flow_logs and end_schedule turn off what they name."
  }
}

run "refuses_no_admin_and_more" {
  command = plan

  variables {
    admin_cidrs           = []
    actor_hosts           = 0
    learner_instance_type = "c7i.4xlarge"
    replay_instance_type  = "r7g.2xlarge"
    actor_instance_types  = ["c7gn.2xlarge"]
    name                  = "Pong 1"
    settings              = { transport = { control_port = 1 } }
    max_hours             = 0
  }

  expect_failures = [var.admin_cidrs, var.actor_hosts, var.learner_instance_type, var.replay_instance_type, var.actor_instance_types, var.name, var.settings, var.max_hours]
}

run "refuses_the_whole_internet_and_more" {
  command = plan

  variables {
    admin_cidrs           = ["203.0.113.7/32", "0.0.0.0/0"]
    learner_instance_type = "g4ad.xlarge"
    actor_instance_types  = ["c7i.2xlarge", "c7i.4xlarge"]
    name                  = "pong-with-a-name-of-more-than-thirty"
    settings              = { actor = { num_actors = 8 } }
  }

  expect_failures = [var.admin_cidrs, var.learner_instance_type, var.actor_instance_types, var.name, var.settings]
}

run "refuses_the_internet_in_two_halves_and_more" {
  command = plan

  variables {
    admin_cidrs = ["0.0.0.0/1", "128.0.0.0/1"]
    settings    = { replay = { host_bytes = 8 } }
    budget_usd  = 50
  }

  expect_failures = [var.admin_cidrs, var.settings, var.budget_email]
}

run "refuses_an_address_without_a_length" {
  command = plan

  variables {
    admin_cidrs = ["203.0.113.7"]
  }

  expect_failures = [var.admin_cidrs]
}

run "refuses_the_whole_internet_of_ipv6" {
  command = plan

  variables {
    admin_cidrs = ["::/0"]
  }

  expect_failures = [var.admin_cidrs]
}

run "refuses_ipv6_which_the_network_does_not_have" {
  command = plan

  variables {
    admin_cidrs = ["203.0.113.7/32", "2001:db8::/48"]
  }

  expect_failures = [var.admin_cidrs]
}
