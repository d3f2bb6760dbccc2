# Log groups: one for each kind of host, and one for packets that the firewall of the own network rejected.

resource "aws_cloudwatch_log_group" "host" {
  #checkov:skip=CKV_AWS_158:encrypted with an AWS key; a customer key costs money and is deleted only a week after destroy
  #checkov:skip=CKV_AWS_338:the log of a training run is not an audit log; var.log_retention_days
  for_each = merge({ for kind in keys(local.hosts) : kind => kind }, local.own_network == 1 ? { refused = "network" } : {})

  name              = "/apex/${var.name}/${each.key}"
  retention_in_days = var.log_retention_days
  tags              = merge(local.tags, { Role = each.value })
}

resource "aws_flow_log" "refused" {
  count = local.own_network

  vpc_id               = aws_vpc.this[0].id
  traffic_type         = "REJECT"
  log_destination_type = "cloud-watch-logs"
  log_destination      = aws_cloudwatch_log_group.host["refused"].arn
  iam_role_arn         = aws_iam_role.flow_logs[0].arn
  tags                 = merge(local.tags, { Name = local.prefix, Role = "network" })
}

data "aws_iam_policy_document" "flow_logs" {
  statement {
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
    resources = ["${local.log_groups}/refused:*"]
  }
}

resource "aws_iam_role" "flow_logs" {
  count = local.own_network

  name               = "${local.prefix}-flow-logs"
  assume_role_policy = data.aws_iam_policy_document.may_assume["vpc-flow-logs"].json
  tags               = merge(local.tags, { Role = "network" })
}

resource "aws_iam_role_policy" "flow_logs" {
  count = local.own_network

  name   = "refused"
  role   = aws_iam_role.flow_logs[0].id
  policy = data.aws_iam_policy_document.flow_logs.json
}
