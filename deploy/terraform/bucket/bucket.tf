# The bucket for checkpoints and curves. Create it once; all clusters use it, and terraform destroy of a cluster keeps it.

terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100"
    }
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = { Project = "apex-zeromq", Role = "bucket" }
  }
}

variable "bucket" {
  description = "Globally unique name of the bucket."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "bucket must be 3 to 63 lower-case letters, digits and dashes."
  }
}

variable "region" {
  description = "AWS region of the bucket and of the clusters."
  type        = string
  default     = "us-east-1"
}

variable "keep_old_days" {
  description = "Number of days during which an overwritten or deleted file can be restored."
  type        = number
  default     = 30

  validation {
    condition     = var.keep_old_days >= 1
    error_message = "keep_old_days must be at least 1."
  }
}

variable "keep_checkpoint_days" {
  description = "Number of days that superseded checkpoints are kept. Best policies, curves and the last checkpoint of a run are kept permanently."
  type        = number
  default     = 7

  validation {
    condition     = var.keep_checkpoint_days >= 1
    error_message = "keep_checkpoint_days must be at least 1."
  }
}

resource "aws_s3_bucket" "checkpoints" {
  #checkov:skip=CKV_AWS_18:an access log would need a second bucket; CloudTrail can record access
  #checkov:skip=CKV_AWS_144:checkpoints can be trained again; a copy in another region doubles the cost
  #checkov:skip=CKV_AWS_145:encrypted with an S3 key; a customer key costs money as long as checkpoints are kept
  #checkov:skip=CKV2_AWS_62:nothing uses events of this bucket
  bucket = var.bucket

  lifecycle {
    prevent_destroy = true
  }
}

resource "aws_s3_bucket_public_access_block" "checkpoints" {
  bucket                  = aws_s3_bucket.checkpoints.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "checkpoints" {
  bucket = aws_s3_bucket.checkpoints.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "checkpoints" {
  bucket = aws_s3_bucket.checkpoints.id

  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "AES256"
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "checkpoints" {
  bucket = aws_s3_bucket.checkpoints.id

  rule {
    id     = "checkpoints"
    status = "Enabled"

    filter {
      tag {
        key   = "Kind" # the tags that apex/cloud/host/bucket.py sets
        value = "checkpoint"
      }
    }

    expiration {
      days = var.keep_checkpoint_days
    }

    noncurrent_version_expiration {
      noncurrent_days = 1
    }
  }

  rule {
    id     = "curves" # hosts replace these each minute
    status = "Enabled"

    filter {
      tag {
        key   = "Kind"
        value = "curve"
      }
    }

    noncurrent_version_expiration {
      noncurrent_days = 1
    }
  }

  rule {
    id     = "old-versions"
    status = "Enabled"

    filter {}

    noncurrent_version_expiration {
      noncurrent_days = var.keep_old_days
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = 2
    }
  }

  depends_on = [aws_s3_bucket_versioning.checkpoints]
}

data "aws_iam_policy_document" "tls_only" {
  statement {
    sid       = "RefusePlainHttp"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.checkpoints.arn, "${aws_s3_bucket.checkpoints.arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "tls_only" {
  bucket     = aws_s3_bucket.checkpoints.id
  policy     = data.aws_iam_policy_document.tls_only.json
  depends_on = [aws_s3_bucket_public_access_block.checkpoints]
}

output "bucket" {
  description = "Name of the bucket. Set the variable bucket of your clusters to this name."
  value       = aws_s3_bucket.checkpoints.bucket
}
