# One network in one zone. Hosts have public addresses; security.tf closes all other ports. There is no NAT gateway and no
# interface endpoint, because they would cost money after the last host has ended.

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
  availability_zone       = local.run.zone
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
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.this.id]
  tags              = { Name = local.prefix, Role = "network" }
}
