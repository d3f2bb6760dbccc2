# What an hour costs, about: list prices in US dollars, written down by hand with their date in prices.json, which
# apex cluster reads too. Other regions cost up to a third more, and prices change. Spot is reckoned with a share of them.

locals {
  table                 = jsondecode(file("${path.module}/prices.json"))
  prices                = local.table.instance_hour
  spot_share            = local.table.spot_share
  price_disk_gb_hour    = local.table.disk_gb_month / 730 # gp3
  price_public_address  = local.table.address_hour
  replay_disk_gb        = max(100, 20 + 3 * local.replay_gib / 2) # three snapshots of half of the memory
  disk_gb               = { replay = local.replay_disk_gb, learner = 200, evaluator = 100, actor = 30 }
  fixed_hosts_cost      = [for type in [var.replay_instance_type, var.learner_instance_type, var.evaluator_instance_type] : lookup(local.prices, type, null)]
  actor_host_cost       = lookup(local.prices, var.actor_instance_types[0], null)
  unpriced              = [for type in [var.replay_instance_type, var.learner_instance_type, var.evaluator_instance_type, var.actor_instance_types[0]] : type if !contains(keys(local.prices), type)]
  extras_cost_per_hour  = local.price_public_address * (3 + var.actor_hosts) + local.price_disk_gb_hour * (local.disk_gb.replay + local.disk_gb.learner + local.disk_gb.evaluator + local.disk_gb.actor * var.actor_hosts)
  actors_cost_per_hour  = length(local.unpriced) > 0 ? 0 : var.actor_hosts * local.actor_host_cost * (var.spot ? local.spot_share : 1)
  cluster_cost_per_hour = length(local.unpriced) > 0 ? 0 : sum(local.fixed_hosts_cost) + local.actors_cost_per_hour + local.extras_cost_per_hour
}
