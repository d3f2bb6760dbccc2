# Permissions of each kind of host: publish the keys of its own roles, read the keys it needs, read max_hours, write its
# log, leave its group. The learner's host may also read and write its run in the bucket, mark itself as unhealthy, and end
# the cluster. No host has access to other clusters. No host may delete in the bucket. A compromised learner's host can let
# the checkpoints of its run expire, by the tag that bucket.tf names, but not the best policies: their old versions stay for
# keep_old_days.

data "aws_caller_identity" "this" {}

data "aws_partition" "this" {}

data "aws_s3_bucket" "checkpoints" { # Makes terraform plan fail if the bucket does not exist.
  bucket = var.bucket
}

data "aws_key_pair" "ssh" { # Makes terraform plan fail if the key pair does not exist.
  count = var.ssh_key_name == null ? 0 : 1

  key_name = var.ssh_key_name
}

data "aws_iam_instance_profile" "given" { # The same for the profiles.
  for_each = var.instance_profiles

  name = each.value
}

locals {
  here       = "${local.region}:${data.aws_caller_identity.this.account_id}"
  aws        = "arn:${data.aws_partition.this.partition}"
  parameters = "${local.aws}:ssm:${local.here}:parameter/apex/${var.name}"
  log_groups = "${local.aws}:logs:${local.here}:log-group:/apex/${var.name}"
  bucket     = "${local.aws}:s3:::${var.bucket}"
  groups     = { for kind in keys(local.hosts) : kind => "${local.aws}:autoscaling:${local.here}:autoScalingGroup:*:autoScalingGroupName/${local.prefix}-${kind}" }

  may_expire = ["checkpoints/?????????/*", "curves/*", "tensorboard/*", "end.json"]

  # The roles whose public keys each role needs.
  checks = {
    replay    = ["learner", "actor"]
    learner   = ["replay", "actor", "evaluator"]
    evaluator = ["learner"]
    actor     = ["learner", "replay"]
  }
  others = {
    for kind, host in local.hosts :
    kind => setsubtract(flatten([for role in host.roles : local.checks[role]]), host.roles)
  }

  # Permissions of some kinds only: actions, resources and conditions.
  duties = {
    for kind in keys(local.hosts) : kind => kind != "learner" ? {
      LeaveGroup = {
        actions = ["autoscaling:TerminateInstanceInAutoScalingGroup"], resources = [local.groups[kind]], only = {}
      }
      } : {
      WriteRun = {
        actions   = ["s3:PutObject", "s3:AbortMultipartUpload", "s3:GetObject"]
        resources = ["${local.bucket}/${var.name}/*"], only = {}
      }
      LetExpire = {
        actions   = ["s3:PutObjectTagging"]
        resources = [for name in local.may_expire : "${local.bucket}/${var.name}/${name}"], only = {}
      }
      FindRun   = { actions = ["s3:ListBucket"], resources = [local.bucket], only = { "s3:prefix" = "${var.name}/*" } }
      EndGroups = { actions = ["autoscaling:SetDesiredCapacity"], resources = values(local.groups), only = {} }
      LeaveGroup = {
        actions = ["autoscaling:DetachInstances", "autoscaling:SetInstanceHealth"], resources = [local.groups[kind]], only = {}
      }
      EndItself = {
        actions   = ["ec2:TerminateInstances"]
        resources = ["${local.aws}:ec2:${local.here}:instance/*"]
        only      = { for key, value in merge(local.tags, { Role = kind }) : "aws:ResourceTag/${key}" => value }
      }
    }
  }
}

data "aws_iam_policy_document" "may_assume" {
  for_each = toset(["ec2", "vpc-flow-logs"])

  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["${each.key}.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "host" {
  for_each = local.hosts

  statement {
    sid       = "PublishOwnKeys"
    actions   = ["ssm:PutParameter", "ssm:DeleteParameter"]
    resources = [for role in each.value.roles : "${local.parameters}/keys/${role}/*"]
  }

  statement {
    sid       = "ReadOthersKeys"
    actions   = ["ssm:GetParametersByPath"]
    resources = flatten([for role in local.others[each.key] : ["${local.parameters}/keys/${role}", "${local.parameters}/keys/${role}/*"]])
  }

  statement {
    sid       = "ReadMaxHours"
    actions   = ["ssm:GetParameter"]
    resources = ["${local.parameters}/max-hours"]
  }

  statement {
    sid       = "Log"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents"]
    resources = ["${local.log_groups}/${each.key}", "${local.log_groups}/${each.key}:*"]
  }

  dynamic "statement" {
    for_each = local.duties[each.key]

    content {
      sid       = statement.key
      actions   = statement.value.actions
      resources = statement.value.resources

      dynamic "condition" {
        for_each = statement.value.only

        content {
          test     = condition.key == "s3:prefix" ? "StringLike" : "StringEquals"
          variable = condition.key
          values   = [condition.value]
        }
      }
    }
  }
}

locals {
  without_profile = { for kind, host in local.hosts : kind => host if !contains(keys(var.instance_profiles), kind) }
}

resource "aws_iam_role" "host" {
  for_each = local.without_profile

  name               = "${local.prefix}-${each.key}"
  description        = "Ape-X ${var.name}: hosts of the kind ${each.key}"
  assume_role_policy = data.aws_iam_policy_document.may_assume["ec2"].json
  tags               = merge(local.tags, { Role = each.key })
}

resource "aws_iam_role_policy" "host" {
  for_each = local.without_profile

  name   = each.key
  role   = aws_iam_role.host[each.key].id
  policy = data.aws_iam_policy_document.host[each.key].json
}

resource "aws_iam_instance_profile" "host" {
  for_each = local.without_profile

  name = "${local.prefix}-${each.key}"
  role = aws_iam_role.host[each.key].name
  tags = merge(local.tags, { Role = each.key })
}
