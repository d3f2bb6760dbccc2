# The two images of a cluster: `gpu` for the learner's host, `cpu` for all others. Both are Ubuntu 24.04.
#
#   ./source.sh && packer init . && packer build -var 'only_from=["198.51.100.7/32"]' .
#
# Both images use one recipe; the two sources in the build block contain the differences. A cluster needs two images of the
# same commit. The images contain no keys and no passwords: Packer uses the credentials of the AWS CLI, and hosts create
# their own keys at the first boot.

packer {
  required_version = ">= 1.6.6"
  # Only with packer >= 1.7: begin
  required_plugins {
    amazon = {
      version = ">= 1.3.0"
      source  = "github.com/hashicorp/amazon"
    }
  }
  # end
}

variable "region" {
  description = "AWS region in which the images are built and can be started."
  type        = string
  default     = "us-east-1"
}

variable "only_from" {
  description = "Networks that may connect to the SSH port of the build machine, such as [\"198.51.100.7/32\"]."
  type        = list(string)

  validation {
    condition     = length(var.only_from) > 0 && length([for cidr in var.only_from : cidr if element(concat(split("/", cidr), ["0"]), 1) == "0"]) == 0
    error_message = "The variable only_from must contain at least one network with its prefix length (198.51.100.7/32) and not the whole Internet (/0)."
  }
}

variable "subnet_id" {
  description = "Subnet of the build machine, with Internet access; empty: a subnet of the default VPC."
  type        = string
  default     = ""
}

variable "gpu_instance_type" {
  description = "Instance type that builds and tests the GPU image. It needs a GPU, because the smoke test checks it."
  type        = string
  default     = "g6.xlarge"
}

variable "check_gpu" {
  description = "Whether the smoke test of the GPU image requires a GPU. Set false if the build machine has none."
  type        = bool
  default     = true
}

variable "cpu_wheels" {
  description = "Package index of PyTorch without CUDA (ten times smaller) for the CPU image; empty: use the default index."
  type        = string
  default     = "https://download.pytorch.org/whl/cpu"
}

locals {
  commit = trimspace(file("${path.root}/build/COMMIT"))
  stamp  = formatdate("YYYYMMDD-hhmmss", timestamp())
}

source "amazon-ebs" "apex" {
  region                                = var.region
  subnet_id                             = var.subnet_id
  temporary_security_group_source_cidrs = var.only_from
  ssh_interface                         = "public_ip"
  ssh_username                          = "ubuntu"
  ssh_clear_authorized_keys             = true
  encrypt_boot                          = true

  # Only with packer >= 1.7: begin
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
  imds_support = "v2.0"
  # end
}

build {
  source "amazon-ebs.apex" {
    name            = "cpu"
    ami_name        = "apex-cpu-${local.stamp}"
    ami_description = "Ape-X over ZeroMQ: replay server, actors, evaluator"
    instance_type   = "c7i.large"

    source_ami_filter {
      most_recent = true
      owners      = ["099720109477"] # Canonical
      filters = {
        name                = "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-*"
        architecture        = "x86_64"
        root-device-type    = "ebs"
        virtualization-type = "hvm"
      }
    }

    launch_block_device_mappings {
      device_name           = "/dev/sda1"
      volume_type           = "gp3"
      throughput            = 125
      iops                  = 3000
      volume_size           = 12
      encrypted             = true
      delete_on_termination = true
    }

    run_tags        = { Project = "apex-zeromq", Role = "cpu", Name = "packer apex-cpu" }
    run_volume_tags = { Project = "apex-zeromq", Role = "cpu" }
    snapshot_tags   = { Project = "apex-zeromq", Role = "cpu" }
    tags            = { Project = "apex-zeromq", Role = "cpu", Commit = local.commit }
  }

  source "amazon-ebs.apex" {
    name            = "gpu"
    ami_name        = "apex-gpu-${local.stamp}"
    ami_description = "Ape-X over ZeroMQ: learner, with NVIDIA's driver"
    instance_type   = var.gpu_instance_type

    source_ami_filter {
      most_recent = true
      owners      = ["898082745236"] # AWS Deep Learning AMIs
      filters = {
        name                = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) *"
        architecture        = "x86_64"
        root-device-type    = "ebs"
        virtualization-type = "hvm"
      }
    }

    launch_block_device_mappings {
      device_name           = "/dev/sda1"
      volume_type           = "gp3"
      throughput            = 125
      iops                  = 3000
      volume_size           = 100
      encrypted             = true
      delete_on_termination = true
    }

    run_tags        = { Project = "apex-zeromq", Role = "gpu", Name = "packer apex-gpu" }
    run_volume_tags = { Project = "apex-zeromq", Role = "gpu" }
    snapshot_tags   = { Project = "apex-zeromq", Role = "gpu" }
    tags            = { Project = "apex-zeromq", Role = "gpu", Commit = local.commit }
  }

  provisioner "shell" {
    inline = ["set -eu; mkdir -m 0700 /tmp/apex-image"]
  }

  provisioner "file" {
    source      = "${path.root}/build/source.tar.gz"
    destination = "/tmp/apex-image/source.tar.gz"
  }

  provisioner "file" {
    source      = "${path.root}/build/units"
    destination = "/tmp/apex-image"
  }

  provisioner "shell" {
    script           = "${path.root}/install.sh"
    execute_command  = "sudo env {{ .Vars }} bash '{{ .Path }}'"
    environment_vars = ["KIND=${source.name}", "COMMIT=${local.commit}", "CPU_WHEELS=${var.cpu_wheels}"]
  }

  provisioner "shell" {
    script           = "${path.root}/smoke.sh"
    execute_command  = "sudo env {{ .Vars }} bash '{{ .Path }}'"
    environment_vars = ["KIND=${source.name}", "COMMIT=${local.commit}", "CHECK_GPU=${var.check_gpu}"]
  }

  provisioner "shell" {
    script          = "${path.root}/clean.sh"
    execute_command = "sudo env {{ .Vars }} bash '{{ .Path }}'"
  }

  post-processor "manifest" {
    output = "${path.root}/build/images.json"
  }
}
