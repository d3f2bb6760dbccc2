# Where the hosts are: in existing subnets, or in a network of their own in one zone. There, hosts have public addresses;
# security.tf closes all other ports. There is no NAT gateway and no interface endpoint, because they would cost money after
# the last host has ended.

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

data "aws_subnet" "given" { # count: their ids may be unknown before apply.
  count = length(var.subnet_ids) + length(var.private_subnet_ids)

  id = concat(var.subnet_ids, var.private_subnet_ids)[count.index]
}

locals {
  own_network = length(var.subnet_ids) == 0 ? 1 : 0
  vpc_id      = try(aws_vpc.this[0].id, data.aws_subnet.given[0].vpc_id, null) # null: an apply failed before the network
  private     = length(var.private_subnet_ids) > 0 ? var.private_subnet_ids : var.subnet_ids
  subnets = {
    for kind in keys(local.hosts) :
    kind => local.own_network == 1 ? aws_subnet.this[*].id : kind == "learner" ? var.subnet_ids : local.private
  }
  places = local.own_network == 1 ? compact([local.zone]) : distinct(data.aws_subnet.given[*].availability_zone)

  earlier = one(values(data.aws_subnet.earlier)[*].availability_zone)
  has_run = length(data.aws_instances.learner_now.ids) + length(data.aws_s3_objects.run.keys) > 0
  next    = try(element(local.zones, index(local.zones, local.earlier) + 1), local.zones[0], null)
  zone    = local.has_run && local.earlier != null ? local.earlier : try(coalesce(var.availability_zone, local.next), null)
}

resource "aws_vpc" "this" {
  count = local.own_network

  cidr_block           = var.vpc_cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = merge(local.tags, { Name = local.prefix, Role = "network" })
}

resource "aws_subnet" "this" {
  #checkov:skip=CKV_AWS_130:only 6006, and 22 with a key, are open, to admin_cidrs; a NAT gateway would cost money after the run
  count = local.own_network

  vpc_id                  = aws_vpc.this[0].id
  cidr_block              = var.vpc_cidr
  availability_zone       = local.zone
  map_public_ip_on_launch = true
  tags                    = merge(local.tags, { Name = local.prefix, Role = "network" })
}

resource "terraform_data" "subnet" { # for replace_triggered_by, which refuses a resource with count = 0
  input = aws_subnet.this[*].arn
}

resource "aws_internet_gateway" "this" {
  count = local.own_network

  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = local.prefix, Role = "network" })
}

resource "aws_route_table" "this" {
  count = local.own_network

  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = local.prefix, Role = "network" })
}

resource "aws_route" "out" {
  count = local.own_network

  route_table_id         = aws_route_table.this[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

resource "aws_route_table_association" "this" {
  count = local.own_network

  subnet_id      = aws_subnet.this[0].id
  route_table_id = aws_route_table.this[0].id
}

resource "aws_vpc_endpoint" "s3" { # a gateway endpoint: free, and checkpoints do not pass through the Internet
  count = local.own_network

  vpc_id            = aws_vpc.this[0].id
  service_name      = "com.amazonaws.${local.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.this[0].id]
  tags              = merge(local.tags, { Name = local.prefix, Role = "network" })
}
