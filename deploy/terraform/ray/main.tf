# What `ray up` needs on EC2, in the default VPC: a security group, a role with which the head node starts and ends only
# hosts of its own cluster, and ../../ray/aws.yaml with their names. Run `ray down` before terraform destroy.

terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }
}

variable "name" {
  description = "Name of the Ray cluster. The role and the security group are called NAME-ray."
  type        = string
  default     = "apex"
}

variable "admin_cidrs" {
  description = "The IPv4 networks from which `ray up` may reach SSH (22)."
  type        = set(string)

  validation {
    condition     = alltrue([for cidr in var.admin_cidrs : can(cidrnetmask(cidr)) && try(tonumber(split("/", cidr)[1]), 0) >= 16])
    error_message = "admin_cidrs must contain only IPv4 networks of /16 or smaller, as in [\"203.0.113.7/32\"]."
  }
}

data "aws_vpc" "default" {
  default = true
}

data "aws_caller_identity" "this" {}

data "aws_region" "this" {}

data "aws_ami" "newest" { # of deploy/packer
  for_each = toset(["cpu", "gpu"])

  most_recent = true
  owners      = ["self"]

  filter {
    name   = "name"
    values = ["apex-${each.key}-*"]
  }

  filter {
    name   = "state"
    values = ["available"]
  }
}

resource "aws_security_group" "this" {
  #checkov:skip=CKV2_AWS_5:Ray attaches it to the hosts that it starts
  name        = "${var.name}-ray"
  description = "Hosts of the Ray cluster ${var.name}"
  vpc_id      = data.aws_vpc.default.id

  ingress {
    description = "all ports of Ray and of the run, from the hosts"
    protocol    = "-1"
    from_port   = 0
    to_port     = 0
    self        = true
  }

  ingress {
    description = "SSH for admin_cidrs"
    protocol    = "tcp"
    from_port   = 22
    to_port     = 22
    cidr_blocks = var.admin_cidrs
  }

  egress {
    description = "to the hosts"
    protocol    = "-1"
    from_port   = 0
    to_port     = 0
    self        = true
  }

  egress {
    description = "AWS APIs, over TLS"
    protocol    = "tcp"
    from_port   = 443
    to_port     = 443
    cidr_blocks = ["0.0.0.0/0"]
  }
}

locals {
  ec2       = "arn:aws:ec2:${data.aws_region.this.name}:${data.aws_caller_identity.this.account_id}"
  instances = ["${local.ec2}:instance/*"]
  # Of what a host is made. It has no role, because the head may not pass on a role.
  parts = concat(
    [aws_security_group.this.arn], values(data.aws_ami.newest)[*].arn,
    [for kind in ["key-pair", "network-interface", "spot-instances-request", "subnet", "volume"] : "${local.ec2}:${kind}/*"],
  )
  rights = [ # actions, resources, and the only value of a key
    [["ec2:DescribeInstances"], ["*"], {}],
    [["ec2:RunInstances"], local.parts, {}],
    [["ec2:RunInstances"], local.instances, { "aws:RequestTag/ray-cluster-name" = var.name }],
    # An account's first spot host needs this role.
    [["iam:CreateServiceLinkedRole"], ["arn:aws:iam::*:role/aws-service-role/spot.amazonaws.com/*"], { "iam:AWSServiceName" = "spot.amazonaws.com" }],
    [["ec2:CreateTags"], local.instances, { "ec2:CreateAction" = "RunInstances" }],
    [["ec2:CreateTags", "ec2:TerminateInstances"], local.instances, { "aws:ResourceTag/ray-cluster-name" = var.name }],
  ]
}

resource "aws_iam_role" "head" {
  name                  = "${var.name}-ray"
  force_detach_policies = true # also of policies that a user has attached, for example for a bucket
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = "ec2.amazonaws.com" } }]
  })
}

resource "aws_iam_role_policy" "head" {
  role = aws_iam_role.head.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [for right in local.rights : merge(
      { Effect = "Allow", Action = right[0], Resource = right[1] },
      length(right[2]) == 0 ? {} : { Condition = { StringEquals = right[2] } },
    )]
  })
}

resource "aws_iam_instance_profile" "head" {
  name = aws_iam_role.head.name
  role = aws_iam_role.head.name
}

output "cluster_file" {
  description = "The file for `ray up`."
  value = templatefile("${path.module}/../../ray/aws.yaml", {
    name  = var.name, region = data.aws_region.this.name, profile = aws_iam_instance_profile.head.name
    group = aws_security_group.this.id, cpu = data.aws_ami.newest["cpu"].id, gpu = data.aws_ami.newest["gpu"].id
  })

  precondition {
    condition     = length(toset(values(data.aws_ami.newest)[*].tags.Commit)) == 1
    error_message = "The newest images for GPUs and CPUs are of different commits. Build both with packer build."
  }
}
