# Required variables

variable "name" {
  description = "Name of the run and its cluster. Every resource name, the folder in the bucket and the curves contain this name."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,28}[a-z0-9]$", var.name)) && !strcontains(var.name, "--")
    error_message = "name must be 2 to 30 lower-case letters, digits and single dashes, and begin with a letter, as in pong-1."
  }
}

variable "admin_cidrs" {
  description = "The IPv4 networks that may reach TensorBoard (6006) and, with ssh_key_name, SSH (22)."
  type        = set(string)

  validation {
    condition     = length(var.admin_cidrs) > 0
    error_message = "admin_cidrs must name at least one network, as in [\"203.0.113.7/32\"]: otherwise nobody can see the curves."
  }

  validation {
    condition     = alltrue([for cidr in var.admin_cidrs : can(cidrnetmask(cidr))])
    error_message = "admin_cidrs must hold CIDR blocks of IPv4, as in [\"203.0.113.7/32\"]: the cluster's network has no IPv6."
  }

  validation {
    condition     = alltrue([for cidr in var.admin_cidrs : try(tonumber(split("/", cidr)[1]), 0) >= 16])
    error_message = "admin_cidrs must contain only networks of /16 or smaller, as in [\"203.0.113.7/32\"]."
  }
}

variable "bucket" {
  description = "Existing S3 bucket for checkpoints and curves, which are stored under NAME/. terraform destroy keeps the bucket. To create one, see bucket/."
  type        = string
}

# Training

variable "environment" {
  description = "Environment: an Atari game, a Gymnasium id, or package.module:factory of a package in the image."
  type        = string
  default     = "ALE/Pong-v5"

  validation {
    condition     = length(var.environment) > 0
    error_message = "environment must name an environment, as in ALE/Pong-v5."
  }
}

variable "seed" {
  description = "Random seed of networks, environments and exploration."
  type        = number
  default     = 1

  validation {
    condition     = var.seed >= 0 && var.seed < 2147483648 && floor(var.seed) == var.seed
    error_message = "seed must be a whole number, 0 to 2147483647."
  }
}

variable "settings" {
  description = "More settings of the run, by section: { learner = { batch_size = 512 } }. settings.json lists them; apex train --print-config explains them."
  type        = map(map(string))
  default     = {}
}

variable "num_actors" {
  description = "Number of actors N, each with its own exploration rate; fixed for the run. 0: as many as the actor_hosts of the first apply can run. Set a larger number if you plan to add hosts, because streams beyond N wait."
  type        = number
  default     = 0

  validation {
    condition     = var.num_actors >= 0 && var.num_actors <= 65536 && floor(var.num_actors) == var.num_actors
    error_message = "num_actors must be a whole number, 1 to 65536, or 0 to compute it from actor_hosts."
  }
}

variable "streams_per_core" {
  description = "Environment streams (actors in the sense of the paper) per core of an actor host."
  type        = number
  default     = 16

  validation {
    condition     = var.streams_per_core >= 1 && var.streams_per_core <= 256 && floor(var.streams_per_core) == var.streams_per_core
    error_message = "streams_per_core must be a whole number, 1 to 256."
  }
}

# Hosts

variable "actor_hosts" {
  description = "Maximum and initial number of actor hosts."
  type        = number
  default     = 3

  validation {
    condition     = var.actor_hosts >= 1 && var.actor_hosts <= 500 && floor(var.actor_hosts) == var.actor_hosts
    error_message = "actor_hosts must be a whole number, 1 to 500."
  }
}

variable "spot" {
  description = "Whether actor hosts are spot instances. They cost less than half, but EC2 may stop them at two minutes' notice. Training continues without them."
  type        = bool
  default     = true
}

variable "learner_spot" {
  description = "Whether the learner's host is a spot instance, which costs about a third of the normal price. If EC2 stops it, a new host restores the run from the bucket, with an empty replay memory."
  type        = bool
  default     = false
}

variable "actor_instance_types" {
  description = "Instance types of actor hosts, in order of preference (of spot hosts, AWS chooses by price and capacity), all with the same number of cores. Several types make spot capacity easier to find."
  type        = list(string)
  default     = ["c7i.2xlarge", "c7a.2xlarge", "c6i.2xlarge", "c6a.2xlarge", "m7i.2xlarge", "m6i.2xlarge"]

  validation {
    condition     = length(var.actor_instance_types) > 0
    error_message = "actor_instance_types must name at least one type, as in c7i.2xlarge."
  }
}

variable "learner_instance_types" {
  description = "Instance types of the learner's host, in order of preference. Each needs an NVIDIA GPU that PyTorch supports, and memory for the replay server: 2,000,000 Atari transitions take 3 GB. Several types make capacity easier to find."
  type        = list(string)
  default     = ["g6.2xlarge", "g5.2xlarge"]

  validation {
    condition     = length(var.learner_instance_types) > 0
    error_message = "learner_instance_types must name at least one type, as in g6.2xlarge."
  }
}

variable "check_quota" {
  description = "Whether terraform plan compares the account's quota of G and VT instances with the vCPUs of the learner's host. false: for credentials that may not read quotas (servicequotas:GetServiceQuota and GetAWSDefaultServiceQuota)."
  type        = bool
  default     = true
}

variable "replay_host" {
  description = "\"learner\": the replay server shares the learner's host, and loaders read its memory directly. \"own\": the replay server has a separate host of replay_instance_type and sends batches over TCP."
  type        = string
  default     = "learner"

  validation {
    condition     = contains(["learner", "own"], var.replay_host)
    error_message = "replay_host must be \"learner\" or \"own\"."
  }
}

variable "replay_instance_type" {
  description = "Instance type of the replay host if replay_host = \"own\". Choose a memory-optimized type, because images that compress badly need up to 100 GB of RAM."
  type        = string
  default     = "r7i.2xlarge"
}

variable "evaluator_host" {
  description = "\"own\": the evaluator has a separate host of evaluator_instance_type. \"learner\": it shares the learner's host, which saves a tenth of the price and takes one or two of its cores."
  type        = string
  default     = "own"

  validation {
    condition     = contains(["learner", "own"], var.evaluator_host)
    error_message = "evaluator_host must be \"own\" or \"learner\"."
  }
}

variable "evaluator_instance_type" {
  description = "Instance type of the evaluator's host if evaluator_host = \"own\"."
  type        = string
  default     = "c7i.xlarge"
}

variable "image_commit" {
  description = "Git commit of the CPU and the GPU image, which their tag Commit shows. null: the commit of the newest GPU image. The first apply fixes it for the run."
  type        = string
  default     = null
}

# Location

variable "availability_zone" {
  description = "Availability zone of all hosts. One zone only, because traffic between zones costs money and adds delay. null: a zone that offers all instance types; if the learner's host found no capacity there, the next apply chooses another one. Fixed once a learner has run."
  type        = string
  default     = null
}

variable "subnet_ids" {
  description = "Existing subnets for the hosts, which must get public addresses there, or a way to AWS (NAT or interface endpoints). []: a VPC of its own, with one subnet. Traffic between zones costs money."
  type        = list(string)
  default     = []
}

variable "private_subnet_ids" {
  description = "Existing subnets of the same VPC for all hosts but the learner's, without public addresses and with a way to AWS (NAT or interface endpoints). []: subnet_ids."
  type        = list(string)
  default     = []

  validation {
    condition     = length(var.private_subnet_ids) == 0 || length(var.subnet_ids) > 0
    error_message = "private_subnet_ids needs subnet_ids, for the learner's host: the cluster's own network has no way to AWS without public addresses."
  }
}

variable "vpc_cidr" {
  description = "Private IPv4 address block of the cluster's own network."
  type        = string
  default     = "10.77.0.0/20"

  validation {
    condition     = can(regex("^(10|172\\.(1[6-9]|2[0-9]|3[01])|192\\.168)\\.", var.vpc_cidr)) && can(cidrhost(var.vpc_cidr, 1000)) && try(tonumber(split("/", var.vpc_cidr)[1]) >= 16, false)
    error_message = "vpc_cidr must be a private IPv4 block between /16 and /22, as in 10.77.0.0/20."
  }
}

variable "instance_profiles" {
  description = "Names of existing instance profiles by kind of host: learner, replay, evaluator, actor; the id of a profile that the same configuration creates. The output host_policies has the permissions that each needs. Other kinds get a role of their own."
  type        = map(string)
  default     = {}

  validation {
    condition     = length(setsubtract(keys(var.instance_profiles), ["learner", "replay", "evaluator", "actor"])) == 0
    error_message = "instance_profiles may have the keys learner, replay, evaluator and actor."
  }
}

variable "ssh_key_name" {
  description = "Name of your EC2 key pair for SSH; opens port 22 to admin_cidrs. null: no SSH. Logs and curves need no SSH."
  type        = string
  default     = null
}

# Time and cost limits

variable "max_hours" {
  description = "Hours from the first apply until the cluster is shut down, even if the run has not ended. You can change it while the cluster runs."
  type        = number
  default     = 24

  validation {
    condition     = var.max_hours >= 1 && var.max_hours <= 720 && floor(var.max_hours) == var.max_hours
    error_message = "max_hours must be a whole number, 1 to 720."
  }
}

variable "stall_minutes" {
  description = "Minutes without a new update (checkpoint) after which the learner's host is replaced. If the new host makes no update in this time either, the cluster is shut down. 0: never. Hosts that start after a change use the new value."
  type        = number
  default     = 60

  validation {
    condition     = var.stall_minutes == 0 || (var.stall_minutes >= 10 && var.stall_minutes <= 1440 && floor(var.stall_minutes) == var.stall_minutes)
    error_message = "stall_minutes must be a whole number, 10 to 1440, or 0: a new host needs minutes until its first checkpoint."
  }

  validation {
    condition     = var.stall_minutes == 0 || try(tonumber(var.settings.checkpoint.period_seconds), 0) <= 30 * var.stall_minutes
    error_message = "stall_minutes must be at least twice the time between two checkpoints (settings.checkpoint.period_seconds), or 0: only a checkpoint shows that the run makes progress."
  }
}

variable "log_retention_days" {
  description = "Number of days that CloudWatch keeps the logs: 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180 or 365."
  type        = number
  default     = 30
}

variable "budget_usd" {
  description = "Monthly budget of this cluster in US dollars. AWS mails budget_email at 80 percent (forecast) and 100 percent (actual). null: no budget."
  type        = number
  default     = null

  validation {
    condition     = var.budget_usd == null ? true : var.budget_usd > 0
    error_message = "budget_usd must be more than 0, or null for no budget."
  }
}

variable "budget_email" {
  description = "E-mail address that receives the budget alarms."
  type        = string
  default     = null

  validation {
    condition     = var.budget_usd == null ? true : can(regex("^[^@ ]+@[^@ ]+$", var.budget_email))
    error_message = "budget_email must be an e-mail address if budget_usd is set."
  }
}
