# What each role's hosts may do: publish a key of their own role, read those that they check, write their log. The
# learner also writes checkpoints and curves, and ends the run; the evaluator reads the curves; an actor host leaves its
# group. No host can name another cluster, and none can delete in the bucket: who takes a host over cannot take the
# weights away.

data "aws_caller_identity" "this" {}

data "aws_partition" "this" {}

data "aws_s3_bucket" "checkpoints" { # Refuses a bucket that is not there, at plan.
  bucket = var.bucket
}

locals {
  here       = "${var.region}:${data.aws_caller_identity.this.account_id}"
  aws        = "arn:${data.aws_partition.this.partition}"
  keys       = "${local.aws}:ssm:${local.here}:parameter/apex/${var.name}/keys"
  log_groups = "${local.aws}:logs:${local.here}:log-group:/apex/${var.name}"
  bucket     = "${local.aws}:s3:::${var.bucket}"

  # Whose public keys a role checks, as apex keys bundles them.
  hears = {
    replay    = ["learner", "actor"]
    learner   = ["replay", "actor", "evaluator"]
    evaluator = ["learner"]
    actor     = ["learner", "replay"]
  }

  group = "${local.aws}:autoscaling:${local.here}:autoScalingGroup:*:autoScalingGroupName/${local.actor_group}"

  # Beside what all have: by role, what it may do, to what, and on what condition.
  duties = {
    replay = {}
    learner = {
      WriteRun = {
        actions = ["s3:PutObject", "s3:AbortMultipartUpload"], resource = "${local.bucket}/${var.name}/*", only = {}
      }
      FindRun   = { actions = ["s3:GetObject"], resource = "${local.bucket}/${var.name}/manifest.json", only = {} }
      EndActors = { actions = ["autoscaling:SetDesiredCapacity"], resource = local.group, only = {} }
      EndHosts = {
        actions  = ["ec2:TerminateInstances"]
        resource = "${local.aws}:ec2:${local.here}:instance/*"
        only     = { for key, value in local.tags : "aws:ResourceTag/${key}" => value }
      }
    }
    evaluator = {
      FindCurves = {
        actions = ["s3:ListBucket"], resource = local.bucket, only = { "s3:prefix" = "${var.name}/tensorboard/*" }
      }
      ReadCurves = { actions = ["s3:GetObject"], resource = "${local.bucket}/${var.name}/tensorboard/*", only = {} }
    }
    actor = {
      LeaveGroup = { actions = ["autoscaling:TerminateInstanceInAutoScalingGroup"], resource = local.group, only = {} }
    }
  }
}

data "aws_iam_policy_document" "hosts_may_assume" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "role" {
  for_each = toset(local.roles)

  statement {
    sid       = "PublishOwnKey"
    actions   = ["ssm:PutParameter", "ssm:DeleteParameter"]
    resources = ["${local.keys}/${each.key}/*"]
  }

  statement {
    sid       = "ReadOthersKeys"
    actions   = ["ssm:GetParametersByPath"]
    resources = flatten([for other in local.hears[each.key] : ["${local.keys}/${other}", "${local.keys}/${other}/*"]])
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
      resources = [statement.value.resource]

      dynamic "condition" {
        for_each = statement.value.only

        content {
          test     = "StringLike"
          variable = condition.key
          values   = [condition.value]
        }
      }
    }
  }
}

resource "aws_iam_role" "role" {
  for_each = toset(local.roles)

  name               = "${local.prefix}-${each.key}"
  description        = "Ape-X ${var.name}: hosts of the role ${each.key}"
  assume_role_policy = data.aws_iam_policy_document.hosts_may_assume.json
  tags               = { Role = each.key }
}

resource "aws_iam_role_policy" "role" {
  for_each = toset(local.roles)

  name   = each.key
  role   = aws_iam_role.role[each.key].id
  policy = data.aws_iam_policy_document.role[each.key].json
}

resource "aws_iam_instance_profile" "role" {
  for_each = toset(local.roles)

  name = "${local.prefix}-${each.key}"
  role = aws_iam_role.role[each.key].name
  tags = { Role = each.key }
}
