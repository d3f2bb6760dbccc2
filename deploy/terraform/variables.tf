# What is asked

variable "name" {
  description = "The run, and the cluster that it is on: names every resource, the folder in the bucket and the curves."
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
    error_message = "admin_cidrs must name at least one network, as in [\"203.0.113.7/32\"]: without one nobody could see the curves."
  }

  validation {
    condition     = alltrue([for cidr in var.admin_cidrs : can(cidrnetmask(cidr))])
    error_message = "admin_cidrs must hold CIDR blocks of IPv4, as in [\"203.0.113.7/32\"]: the cluster's network has no IPv6, so nobody would get in by it."
  }

  validation {
    condition     = alltrue([for cidr in var.admin_cidrs : try(tonumber(split("/", cidr)[1]), 0) >= 16])
    error_message = "admin_cidrs must not be a great part of the Internet: /16 or longer."
  }
}

variable "bucket" {
  description = "An existing S3 bucket for checkpoints and curves, below NAME/. It outlives the cluster; see bucket/."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "bucket must be the name of an S3 bucket; terraform -chdir=bucket apply makes one."
  }
}

# What is trained

variable "environment" {
  description = "What is played: an Atari game, a Gymnasium id, or package.module:factory from the image."
  type        = string
  default     = "ALE/Pong-v5"

  validation {
    condition     = length(var.environment) > 0
    error_message = "environment must name an environment, as in ALE/Pong-v5."
  }
}

variable "seed" {
  description = "Of networks, environments and exploration."
  type        = number
  default     = 1

  validation {
    condition     = var.seed >= 0 && var.seed < 2147483648 && floor(var.seed) == var.seed
    error_message = "seed must be a whole number, 0 to 2147483647."
  }
}

variable "settings" {
  description = "Further settings of the run by section, as apex train --print-config names them: { learner = { batch_size = 512 } }."
  type        = map(map(string))
  default     = {}

  validation {
    condition = alltrue([
      for section in keys(var.settings) :
      contains(["environment", "actor", "replay", "learner", "network", "evaluator", "checkpoint", "run"], section)
    ])
    error_message = "settings has the sections environment, actor, replay, learner, network, evaluator, checkpoint and run. Addresses, ports and keys (transport) are the cluster's."
  }

  validation {
    condition     = alltrue(flatten([for settings in values(var.settings) : [for setting in keys(settings) : can(regex("^[a-z0-9_]+$", setting))]]))
    error_message = "settings: a setting is named in lower-case letters, digits and underscores, as in batch_size."
  }

  validation {
    condition = length(setintersection(
      flatten([for section, settings in var.settings : [for setting in keys(settings) : "${section}.${setting}"]]),
      ["environment.id", "actor.num_actors", "actor.num_processes", "actor.envs_per_process", "replay.num_shards", "replay.host_bytes", "run.name", "run.folder"],
    )) == 0
    error_message = "settings must not have environment.id, actor.num_actors, actor.num_processes, actor.envs_per_process, replay.num_shards, replay.host_bytes, run.name or run.folder: they follow from environment, num_actors, streams_per_core, the instance types and name."
  }
}

variable "num_actors" {
  description = "N, the length of the ladder of epsilons, fixed for the run. 0: as many streams as the first apply's actor_hosts have. Choose it larger if you mean to add hosts: beyond N an actor waits."
  type        = number
  default     = 0

  validation {
    condition     = var.num_actors >= 0 && var.num_actors <= 65536 && floor(var.num_actors) == var.num_actors
    error_message = "num_actors must be a whole number, 1 to 65536, or 0: by actor_hosts."
  }
}

variable "streams_per_core" {
  description = "Environment streams (actors, as in the paper) that one core of an actor host steps."
  type        = number
  default     = 16

  validation {
    condition     = var.streams_per_core >= 1 && var.streams_per_core <= 256 && floor(var.streams_per_core) == var.streams_per_core
    error_message = "streams_per_core must be a whole number, 1 to 256."
  }
}

# On what

variable "actor_hosts" {
  description = "The most hosts that the group of actors may have, and how many it begins with."
  type        = number
  default     = 3

  validation {
    condition     = var.actor_hosts >= 1 && var.actor_hosts <= 500 && floor(var.actor_hosts) == var.actor_hosts
    error_message = "actor_hosts must be a whole number, 1 to 500: without actors nothing is learned."
  }
}

variable "spot" {
  description = "Whether actor hosts are spot instances: less than half the price, and they may go at two minutes' notice, which training survives."
  type        = bool
  default     = true
}

variable "learner_spot" {
  description = "Whether the learner's host is a spot instance: a third of the price. When it goes, its group starts another, which restores the run from the bucket; the replay memory begins empty."
  type        = bool
  default     = false
}

variable "actor_instance_types" {
  description = "Types for actor hosts with equally many cores, the preferred first. Several, so that spot capacity is found."
  type        = list(string)
  default     = ["c7i.2xlarge", "c7a.2xlarge", "c6i.2xlarge", "c6a.2xlarge", "m7i.2xlarge", "m6i.2xlarge"]

  validation {
    condition     = length(var.actor_instance_types) > 0
    error_message = "actor_instance_types must name at least one type, as in c7i.2xlarge."
  }
}

variable "learner_instance_type" {
  description = "With an NVIDIA GPU that PyTorch supports, and memory for the replay server: 2,000,000 Atari transitions take 3 GB."
  type        = string
  default     = "g6.2xlarge"
}

variable "replay_host" {
  description = "\"learner\": the replay server shares the learner's host, whose loaders draw from its memory. \"own\": it has a host of its own, of replay_instance_type, and batches come by TCP."
  type        = string
  default     = "learner"

  validation {
    condition     = contains(["learner", "own"], var.replay_host)
    error_message = "replay_host must be \"learner\" or \"own\"."
  }
}

variable "replay_instance_type" {
  description = "For replay_host = \"own\". Memory-optimized: images that compress badly take up to 100 GB."
  type        = string
  default     = "r7i.2xlarge"
}

variable "evaluator_instance_type" {
  description = "Plays full games."
  type        = string
  default     = "c7i.xlarge"
}

variable "image_commit" {
  description = "The commit of both images, as in their tag Commit. null: that of the newest GPU image. Decided by the first apply."
  type        = string
  default     = null
}

# Where

variable "region" {
  description = "The region of images, bucket and hosts."
  type        = string
  default     = "us-east-1"

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region must be an AWS region, as in us-east-1."
  }
}

variable "availability_zone" {
  description = "The one zone of all hosts: traffic between zones costs, and adds delay. null: the first that offers all instance types. Decided by the first apply."
  type        = string
  default     = null

  validation {
    condition     = var.availability_zone == null ? true : startswith(var.availability_zone, var.region)
    error_message = "availability_zone must be a zone of var.region, as in us-east-1a."
  }
}

variable "vpc_cidr" {
  description = "Private addresses of the cluster's own network."
  type        = string
  default     = "10.77.0.0/20"

  validation {
    condition     = can(regex("^(10|172\\.(1[6-9]|2[0-9]|3[01])|192\\.168)\\.", var.vpc_cidr)) && can(cidrhost(var.vpc_cidr, 1000)) && try(tonumber(split("/", var.vpc_cidr)[1]) >= 16, false)
    error_message = "vpc_cidr must be a private IPv4 block between /16 and /22, as in 10.77.0.0/20."
  }
}

variable "ssh_key_name" {
  description = "An EC2 key pair of yours, for SSH, which opens port 22 to admin_cidrs. null: none; logs and curves need no SSH."
  type        = string
  default     = null
}

# Until when, and for how much

variable "max_hours" {
  description = "The cluster ends so many hours after the first apply, whatever happens. It may be changed while the cluster runs."
  type        = number
  default     = 24

  validation {
    condition     = var.max_hours >= 1 && var.max_hours <= 720 && floor(var.max_hours) == var.max_hours
    error_message = "max_hours must be a whole number, 1 to 720."
  }
}

variable "log_retention_days" {
  description = "How long CloudWatch keeps what the roles log."
  type        = number
  default     = 30

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365], var.log_retention_days)
    error_message = "log_retention_days must be one of CloudWatch's: 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180 or 365."
  }
}

variable "budget_usd" {
  description = "A month's spending on this cluster, in US dollars, at 80 and 100 percent of which budget_email gets a letter. null: no alarm."
  type        = number
  default     = null

  validation {
    condition     = var.budget_usd == null ? true : var.budget_usd > 0
    error_message = "budget_usd must be more than 0, or null: no alarm."
  }
}

variable "budget_email" {
  description = "Who is told of the budget."
  type        = string
  default     = null

  validation {
    condition     = var.budget_usd == null ? true : can(regex("^[^@ ]+@[^@ ]+$", var.budget_email))
    error_message = "budget_email must be a mail address when budget_usd is set."
  }
}
