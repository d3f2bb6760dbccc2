# The newest images of deploy/packer in this account. A host keeps the image that it began with: all programs of a run
# are of one version, and a new image replaces nothing that trains.

data "aws_ami" "image" {
  for_each = toset(["cpu", "gpu"])

  most_recent = true
  owners      = ["self"]

  filter {
    name   = "name"
    values = ["apex-${each.key}-*"]
  }

  filter {
    name   = "tag:Project"
    values = [local.tags.Project]
  }

  filter {
    name   = "tag:Role"
    values = [each.key]
  }
}
