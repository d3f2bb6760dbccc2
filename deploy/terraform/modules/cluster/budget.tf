# An optional budget alarm by e-mail. It counts the cost of resources with the tag Cluster = NAME. First activate this tag
# as a cost allocation tag of the account (Billing, Cost allocation tags); activation takes a day.

resource "aws_budgets_budget" "this" {
  count = var.budget_usd == null ? 0 : 1

  name         = local.prefix
  budget_type  = "COST"
  limit_amount = tostring(var.budget_usd)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"
  tags         = merge(local.tags, { Role = "budget" })

  cost_filter {
    name   = "TagKeyValue"
    values = [format("user:Cluster$%s", var.name)]
  }

  dynamic "notification" {
    for_each = { 80 = "FORECASTED", 100 = "ACTUAL" }

    content {
      comparison_operator        = "GREATER_THAN"
      threshold                  = tonumber(notification.key)
      threshold_type             = "PERCENTAGE"
      notification_type          = notification.value
      subscriber_email_addresses = [var.budget_email]
    }
  }
}
