terraform {
  required_version = ">= 1.9" # validations that refer to other objects

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100"
    }
  }
}
