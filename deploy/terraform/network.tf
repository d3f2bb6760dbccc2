# One network in one zone. Hosts have public addresses; security.tf closes all other ports. There is no NAT gateway and no
# interface endpoint, because they would cost money after the last host has ended.

# The zone of an earlier apply. Until a learner has run there, for example because the zone has no such hosts left, each apply
# tries the next zone, or availability_zone if it is set.
data "aws_subnets" "earlier" {
  tags = merge(local.tags, { Role = "network" })
}

data "aws_subnet" "earlier" {
  for_each = toset(data.aws_subnets.earlier.ids)

  id = each.key
}

data "aws_instances" "learner_now" {
  instance_tags        = merge(local.tags, { Role = "learner" })
  instance_state_names = ["pending", "running", "stopping", "stopped"]
}

data "aws_s3_objects" "run" {
  bucket   = var.bucket
  prefix   = "${var.name}/"
  max_keys = 1
}

locals {
  earlier = one(values(data.aws_subnet.earlier)[*].availability_zone)
  has_run = length(data.aws_instances.learner_now.ids) + length(data.aws_s3_objects.run.keys) > 0
  next    = try(element(local.zones, index(local.zones, local.earlier) + 1), local.zones[0], null)
  zone    = local.has_run && local.earlier != null ? local.earlier : try(coalesce(var.availability_zone, local.next), null)
}

resource "aws_vpc" "this" {
  cidr_block           = var.vpc_cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = local.prefix, Role = "network" }
}

resource "aws_subnet" "this" {
  #checkov:skip=CKV_AWS_130:only 6006, and 22 with a key, are open, to admin_cidrs; a NAT gateway would cost money after the run
  vpc_id                  = aws_vpc.this.id
  cidr_block              = var.vpc_cidr
  availability_zone       = local.zone
  map_public_ip_on_launch = true
  tags                    = { Name = local.prefix, Role = "network" }
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = local.prefix, Role = "network" }
}

resource "aws_route_table" "this" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = local.prefix, Role = "network" }
}

resource "aws_route" "out" {
  route_table_id         = aws_route_table.this.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "this" {
  subnet_id      = aws_subnet.this.id
  route_table_id = aws_route_table.this.id
}

resource "aws_vpc_endpoint" "s3" { # a gateway endpoint: free, and checkpoints do not pass through the Internet
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${local.run.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.this.id]
  tags              = { Name = local.prefix, Role = "network" }
}
