# The images of deploy/packer in this account. The newest GPU image determines the commit; both images must have it.
#
# No data source here has conditions: Terraform would read it only during apply if anything that it depends on changes.

data "aws_ami_ids" "gpu" {
  owners = ["self"]

  dynamic "filter" {
    for_each = { "tag:Project" = local.tags.Project, "tag:Role" = "gpu", state = "available" }

    content {
      name   = filter.key
      values = [filter.value]
    }
  }
}

data "aws_ami" "newest" {
  count = min(1, length(data.aws_ami_ids.gpu.ids))

  owners = ["self"]

  filter {
    name   = "image-id"
    values = [data.aws_ami_ids.gpu.ids[0]] # newest first
  }
}

data "aws_ami_ids" "image" {
  for_each = toset(["cpu", "gpu"])

  owners = ["self"]

  dynamic "filter" {
    for_each = { "tag:Project" = local.tags.Project, "tag:Role" = each.key, "tag:Commit" = local.run.commit, state = "available" }

    content {
      name   = filter.key
      values = [filter.value]
    }
  }
}

data "aws_ami" "image" {
  for_each = { for kind, image in data.aws_ami_ids.image : kind => image.ids[0] if length(image.ids) > 0 }

  owners = ["self"]

  filter {
    name   = "image-id"
    values = [each.value]
  }
}

locals {
  image_kinds = { for kind in keys(local.hosts) : kind => kind == "learner" ? "gpu" : "cpu" }
}
