# One cluster. To create several, or to use them in a configuration of your own, call the module: examples/complete.
#
# A module that for_each may use must not configure a provider, so this folder does. variables.tf is a link to the module's
# file, because Terraform needs the definitions in both places.

terraform {
  required_version = ">= 1.9" # validations that refer to other objects

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100"
    }
  }
}

variable "region" {
  description = "AWS region of images, bucket and hosts. The first apply fixes it until terraform destroy."
  type        = string
  default     = "us-east-1"
}

# The provider stays in the region of the first apply. In another region it would not find the cluster, and Terraform would
# forget it while it costs money.
resource "terraform_data" "region" {
  input = var.region

  lifecycle {
    ignore_changes = [input]
  }
}

check "region" {
  assert {
    condition     = var.region == terraform_data.region.input
    error_message = "region = ${var.region} has no effect: this cluster is in ${terraform_data.region.input} until terraform destroy."
  }
}

provider "aws" {
  region = terraform_data.region.input
}

module "cluster" {
  source = "./modules/cluster"

  name                    = var.name
  admin_cidrs             = var.admin_cidrs
  bucket                  = var.bucket
  environment             = var.environment
  seed                    = var.seed
  settings                = var.settings
  num_actors              = var.num_actors
  streams_per_core        = var.streams_per_core
  actor_hosts             = var.actor_hosts
  spot                    = var.spot
  learner_spot            = var.learner_spot
  actor_instance_types    = var.actor_instance_types
  learner_instance_types  = var.learner_instance_types
  check_quota             = var.check_quota
  replay_host             = var.replay_host
  replay_instance_type    = var.replay_instance_type
  evaluator_host          = var.evaluator_host
  evaluator_instance_type = var.evaluator_instance_type
  image_commit            = var.image_commit
  availability_zone       = var.availability_zone
  subnet_ids              = var.subnet_ids
  private_subnet_ids      = var.private_subnet_ids
  vpc_cidr                = var.vpc_cidr
  instance_profiles       = var.instance_profiles
  ssh_key_name            = var.ssh_key_name
  max_hours               = var.max_hours
  stall_minutes           = var.stall_minutes
  log_retention_days      = var.log_retention_days
  budget_usd              = var.budget_usd
  budget_email            = var.budget_email
}

output "tensorboard_url" {
  description = "Address of TensorBoard, reachable from admin_cidrs. It changes if the learner's host is replaced. To see the new address, run terraform apply -refresh-only or apex cluster list."
  value       = module.cluster.tensorboard_url
}

output "cluster" {
  description = "Names and ids of what the module has created."
  value       = module.cluster
}
