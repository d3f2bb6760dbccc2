# What a host is told at its first boot: its settings, one file, one unit. Nothing is installed, cloned or fetched, and
# nothing here is secret: each host makes its own keys (apex-keys.service) and publishes the public halves in SSM.

# N is fixed for the run, whatever becomes of the number of hosts.
resource "terraform_data" "ladder" {
  input = var.num_actors > 0 ? var.num_actors : var.actor_hosts * local.streams_per_host

  lifecycle {
    ignore_changes = [input]
  }
}

locals {
  # What the roles other than the learner do not say they are told by it.
  own_settings = {
    replay    = { transport = { bind = local.address.replay, keys = "/var/lib/apex/keys" } }
    evaluator = { transport = { keys = "/var/lib/apex/keys" } }
    actor = {
      actor     = { num_processes = local.actor_cores, envs_per_process = var.streams_per_core }
      transport = { keys = "/var/lib/apex/keys" }
    }
    learner = {
      for section in distinct(concat(keys(var.settings), ["environment", "actor", "replay", "run", "transport"])) :
      section => merge(lookup(var.settings, section, {}), lookup(local.learner_settings, section, {}))
    }
  }

  learner_settings = {
    environment = { id = var.environment }
    actor = {
      num_actors       = terraform_data.ladder.input
      num_processes    = local.actor_cores
      envs_per_process = var.streams_per_core
    }
    replay    = { host_bytes = local.replay_gib * 1024 * 1024 * 1024 } # The learner sizes it, and would by its own memory.
    run       = { name = var.name, folder = "/var/lib/apex/runs" }
    transport = { bind = local.address.learner, keys = "/var/lib/apex/keys" }
  }

  # A number or a truth value stands as it is, anything else in quotes: no setting is a text that looks like a number.
  toml = {
    for role in local.roles : role => join("\n", concat(
      role == "learner" ? ["seed = ${var.seed}"] : [],
      flatten([
        for section, settings in local.own_settings[role] : concat(
          ["", "[${section}]"],
          [for setting, value in settings : "${setting} = ${can(regex("^(true|false|-?[0-9]+([.][0-9]+)?(e-?[0-9]+)?)$", value)) ? value : jsonencode(value)}"],
        )
      ]),
      [""],
    ))
  }

  cluster_env = {
    for role in local.roles : role => join("", [for key, value in {
      APEX_CLUSTER     = var.name
      APEX_ROLE        = role
      APEX_REGION      = var.region
      APEX_BUCKET      = var.bucket
      APEX_LEARNER     = local.address.learner
      APEX_REPLAY      = local.address.replay
      APEX_MAX_HOURS   = var.max_hours
      APEX_ACTOR_GROUP = local.actor_group
    } : "${key}=${value}\n"])
  }

  user_data = {
    for role in local.roles : role => base64encode(join("\n", ["#cloud-config", yamlencode({
      package_update  = false
      package_upgrade = false
      write_files = [
        { path = "/etc/apex/cluster.env", permissions = "0644", content = local.cluster_env[role] },
        { path = "/etc/apex/${role}.toml", permissions = "0644", content = local.toml[role] },
      ]
      # What else the role needs, its unit wants.
      runcmd = [["systemctl", "enable", "--now", "--no-block", "apex@${role}.service"]]
    })]))
  }
}

check "ladder" {
  assert {
    condition     = var.actor_hosts * local.streams_per_host <= terraform_data.ladder.input
    error_message = "actor_hosts = ${var.actor_hosts} could run ${var.actor_hosts * local.streams_per_host} actors, but this run has num_actors = ${terraform_data.ladder.input}: hosts beyond that wait until another goes."
  }
}
