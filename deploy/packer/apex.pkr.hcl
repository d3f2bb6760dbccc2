# The two images of a cluster: `gpu` for the learner's host, `cpu` for all others. Both are Ubuntu 24.04.
#
#   ./source.sh && packer init . && packer build .
#
# One recipe for both; the two sources of the build block hold the differences. A cluster takes two images of one commit. No key, no password and no address of
# anybody is in here: credentials come from where the AWS tools look, and machines make their own keys at first boot.

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
  description = "Where the images are built, and where they can be started."
  type        = string
  default     = "us-east-1"
}

variable "only_from" {
  description = "The networks that may reach the build machine's SSH port while it lives, such as [\"198.51.100.7/32\"]."
  type        = list(string)

  validation {
    condition     = length(var.only_from) > 0 && length([for cidr in var.only_from : cidr if element(concat(split("/", cidr), ["0"]), 1) == "0"]) == 0
    error_message = "The variable only_from must name networks with their length, and not the whole Internet."
  }
}

variable "subnet_id" {
  description = "A subnet with a way out; empty: the default VPC's."
  type        = string
  default     = ""
}

variable "gpu_instance_type" {
  description = "On what the GPU image is built and tried out: it needs a GPU, so that the smoke test sees it."
  type        = string
  default     = "g6.xlarge"
}

variable "check_gpu" {
  description = "Whether the smoke test must find a GPU on the machine that builds the GPU image; false: where the machine has none."
  type        = bool
  default     = true
}

variable "cpu_wheels" {
  description = "Where pip finds PyTorch without CUDA, which is ten times smaller; empty: nowhere."
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
    source      = "${path.root}/../units"
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
