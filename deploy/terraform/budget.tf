# An optional letter about money. It sees what is tagged Cluster = NAME, once that tag is a cost allocation tag of the
# account (Billing, Cost allocation tags; takes a day).

resource "aws_budgets_budget" "this" {
  count = var.budget_usd == null ? 0 : 1

  name         = local.prefix
  budget_type  = "COST"
  limit_amount = tostring(var.budget_usd)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"
  tags         = { Role = "budget" }

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
