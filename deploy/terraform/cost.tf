# What an hour costs, about. On-demand list prices in US dollars an hour, us-east-1, Linux, as of mid 2025, written down
# by hand: other regions cost up to a third more, and prices change. Spot is reckoned with 40 % of them.

locals {
  prices = {
    "c6a.xlarge"  = 0.153, "c6a.2xlarge" = 0.306, "c6a.4xlarge" = 0.612, "c6a.8xlarge" = 1.224
    "c6i.xlarge"  = 0.17, "c6i.2xlarge" = 0.34, "c6i.4xlarge" = 0.68, "c6i.8xlarge" = 1.36
    "c7a.xlarge"  = 0.20528, "c7a.2xlarge" = 0.41056, "c7a.4xlarge" = 0.82112, "c7a.8xlarge" = 1.64224
    "c7i.xlarge"  = 0.1785, "c7i.2xlarge" = 0.357, "c7i.4xlarge" = 0.714, "c7i.8xlarge" = 1.428
    "m6i.xlarge"  = 0.192, "m6i.2xlarge" = 0.384, "m6i.4xlarge" = 0.768, "m6i.8xlarge" = 1.536
    "m7i.xlarge"  = 0.2016, "m7i.2xlarge" = 0.4032, "m7i.4xlarge" = 0.8064, "m7i.8xlarge" = 1.6128
    "r6i.xlarge"  = 0.252, "r6i.2xlarge" = 0.504, "r6i.4xlarge" = 1.008, "r6i.8xlarge" = 2.016
    "r7i.xlarge"  = 0.2646, "r7i.2xlarge" = 0.5292, "r7i.4xlarge" = 1.0584, "r7i.8xlarge" = 2.1168
    "g4dn.xlarge" = 0.526, "g4dn.2xlarge" = 0.752, "g4dn.4xlarge" = 1.204
    "g5.xlarge"   = 1.006, "g5.2xlarge" = 1.212, "g5.4xlarge" = 1.624
    "g6.xlarge"   = 0.8048, "g6.2xlarge" = 0.9776, "g6.4xlarge" = 1.3232
    "g6e.xlarge"  = 1.861, "g6e.2xlarge" = 2.24208, "g6e.4xlarge" = 3.00424
  }
  spot_share            = 0.4
  price_disk_gb_hour    = 0.08 / 730 # gp3
  price_public_address  = 0.005
  disk_gb               = { replay = 100, learner = 200, evaluator = 100, actor = 30 }
  fixed_hosts_cost      = [for type in [var.replay_instance_type, var.learner_instance_type, var.evaluator_instance_type] : lookup(local.prices, type, null)]
  actor_host_cost       = lookup(local.prices, var.actor_instance_types[0], null)
  unpriced              = [for type in [var.replay_instance_type, var.learner_instance_type, var.evaluator_instance_type, var.actor_instance_types[0]] : type if !contains(keys(local.prices), type)]
  extras_cost_per_hour  = local.price_public_address * (3 + var.actor_hosts) + local.price_disk_gb_hour * (local.disk_gb.replay + local.disk_gb.learner + local.disk_gb.evaluator + local.disk_gb.actor * var.actor_hosts)
  actors_cost_per_hour  = length(local.unpriced) > 0 ? 0 : var.actor_hosts * local.actor_host_cost * (var.spot ? local.spot_share : 1)
  cluster_cost_per_hour = length(local.unpriced) > 0 ? 0 : sum(local.fixed_hosts_cost) + local.actors_cost_per_hour + local.extras_cost_per_hour
}
