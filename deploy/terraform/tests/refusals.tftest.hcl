# What is refused at plan, each with one variable wrong. Nothing is asked of AWS: the provider is a stand-in.

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
    condition     = strcontains(output.cost, "USD an hour") && length(local.unpriced) == 0
    error_message = "The default types have prices."
  }

  assert {
    condition     = length(aws_budgets_budget.this) == 0
    error_message = "Without budget_usd there is no alarm."
  }
}

run "accepts_both_kinds_of_addresses" {
  command = plan

  variables {
    admin_cidrs = ["203.0.113.0/24", "2001:db8::/48"]
  }

  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.admin) == 10
    error_message = "Two networks reach SSH on four roles, and TensorBoard."
  }
}

run "a_ladder_longer_than_the_hosts_of_the_beginning" {
  command = plan

  variables {
    num_actors = 3072
  }

  assert {
    condition     = terraform_data.ladder.input == 3072 && strcontains(local.toml.learner, "num_actors = 3072")
    error_message = "num_actors is N."
  }
}

run "an_alarm_where_there_is_a_budget" {
  command = plan

  variables {
    budget_usd   = 50
    budget_email = "somebody@example.org"
  }

  assert {
    condition     = aws_budgets_budget.this[0].limit_amount == "50" && length(aws_budgets_budget.this[0].notification) == 2
    error_message = "Letters at 80 and at 100 percent."
  }
}

run "says_when_it_knows_no_price" {
  command = plan

  variables {
    learner_instance_type = "p5.48xlarge"
  }

  assert {
    condition     = startswith(output.cost, "unknown: no price of p5.48xlarge")
    error_message = "No price is made up."
  }
}

run "what_an_emulator_lacks_can_be_left_out" {
  command = plan

  variables {
    flow_logs    = false
    end_schedule = false
  }

  assert {
    condition     = length(aws_flow_log.refused) + length(aws_iam_role.flow_logs) + length(aws_cloudwatch_log_group.refused) + length(aws_autoscaling_schedule.end) == 0
    error_message = "flow_logs and end_schedule turn off what they name."
  }
}

run "refuses_no_admin" {
  command = plan

  variables {
    admin_cidrs = []
  }

  expect_failures = [var.admin_cidrs]
}

run "refuses_the_whole_internet" {
  command = plan

  variables {
    admin_cidrs = ["203.0.113.7/32", "0.0.0.0/0"]
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

run "refuses_the_internet_in_two_halves" {
  command = plan

  variables {
    admin_cidrs = ["0.0.0.0/1", "128.0.0.0/1"]
  }

  expect_failures = [var.admin_cidrs]
}

run "refuses_an_address_without_a_length" {
  command = plan

  variables {
    admin_cidrs = ["203.0.113.7"]
  }

  expect_failures = [var.admin_cidrs]
}

run "refuses_no_actors" {
  command = plan

  variables {
    actor_hosts = 0
  }

  expect_failures = [var.actor_hosts]
}

run "refuses_a_learner_without_a_gpu" {
  command = plan

  variables {
    learner_instance_type = "c7i.4xlarge"
  }

  expect_failures = [var.learner_instance_type]
}

run "refuses_a_learner_with_a_gpu_of_another_make" {
  command = plan

  variables {
    learner_instance_type = "g4ad.xlarge"
  }

  expect_failures = [var.learner_instance_type]
}

run "refuses_graviton_replay" {
  command = plan

  variables {
    replay_instance_type = "r7g.2xlarge"
  }

  expect_failures = [var.replay_instance_type]
}

run "refuses_graviton_actors" {
  command = plan

  variables {
    actor_instance_types = ["c7gn.2xlarge"]
  }

  expect_failures = [var.actor_instance_types]
}

run "refuses_actors_of_two_sizes" {
  command = plan

  variables {
    actor_instance_types = ["c7i.2xlarge", "c7i.4xlarge"]
  }

  expect_failures = [var.actor_instance_types]
}

run "refuses_a_bad_name" {
  command = plan

  variables {
    name = "Pong 1"
  }

  expect_failures = [var.name]
}

run "refuses_a_name_that_is_too_long" {
  command = plan

  variables {
    name = "pong-with-a-name-of-more-than-thirty"
  }

  expect_failures = [var.name]
}

run "refuses_a_port_among_the_settings" {
  command = plan

  variables {
    settings = { transport = { control_port = 1 } }
  }

  expect_failures = [var.settings]
}

run "refuses_a_setting_that_follows_from_others" {
  command = plan

  variables {
    settings = { actor = { num_actors = 8 } }
  }

  expect_failures = [var.settings]
}

run "refuses_a_budget_without_a_reader" {
  command = plan

  variables {
    budget_usd = 50
  }

  expect_failures = [var.budget_email]
}

run "refuses_to_run_for_ever" {
  command = plan

  variables {
    max_hours = 0
  }

  expect_failures = [var.max_hours]
}
