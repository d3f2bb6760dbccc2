# Two runs in one VPC that exists already, with their state in S3. All hosts but the learners' have no public addresses.

terraform {
  required_version = ">= 1.10" # use_lockfile

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100" # version 6 has not been run
    }
  }

  backend "s3" { # The bucket of the state; it must exist. Whoever may read it sees names and addresses, but no secret.
    bucket       = "terraform-state-of-mine"
    key          = "apex/terraform.tfstate"
    region       = "us-east-1"
    use_lockfile = true
  }
}

provider "aws" {
  region = "us-east-1"
}

variable "subnet_ids" {
  description = "Existing subnets with public addresses, for the learners."
  type        = list(string)
}

variable "private_subnet_ids" {
  description = "Existing subnets with a NAT gateway, for all other hosts."
  type        = list(string)
}

variable "admin_cidrs" {
  description = "The IPv4 networks that may reach TensorBoard."
  type        = set(string)
}

variable "bucket" {
  description = "Existing bucket for checkpoints and curves."
  type        = string
}

variable "runs" {
  description = "The runs by name."
  type        = map(object({ environment = string, actor_hosts = optional(number, 3) }))
  default     = { pong-1 = { environment = "ALE/Pong-v5" }, breakout-1 = { environment = "ALE/Breakout-v5" } }
}

module "cluster" {
  source   = "../../modules/cluster"
  for_each = var.runs

  name               = each.key
  environment        = each.value.environment
  actor_hosts        = each.value.actor_hosts
  num_actors         = 768 # for 6 hosts of 8 cores
  evaluator_host     = "learner"
  subnet_ids         = var.subnet_ids
  private_subnet_ids = var.private_subnet_ids
  admin_cidrs        = var.admin_cidrs
  bucket             = var.bucket
}

output "clusters" {
  description = "Address of TensorBoard, names and ids of each cluster."
  value       = module.cluster
}
