terraform {
  required_version = ">= 1.9" # validations that refer to other objects

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100"
    }
  }
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

  default_tags {
    tags = local.tags
  }
}
