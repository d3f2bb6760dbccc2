# User data of the hosts for their first boot: settings and systemd units. The first boot installs and downloads nothing.
# User data contains no secrets: each host creates its own keys (apex-keys.service) and publishes the public ones in SSM.

locals {
  # The other roles receive their settings from the learner.
  role_settings = {
    actor = { actor = { num_processes = local.actor_cores, envs_per_process = var.streams_per_core } }
    learner = {
      for section in distinct(concat(keys(var.settings), keys(local.learner_settings))) :
      section => merge(lookup(var.settings, section, {}), lookup(local.learner_settings, section, {}))
    }
  }

  learner_settings = {
    environment = { id = var.environment }
    actor = {
      num_actors       = local.run.num_actors
      num_processes    = local.actor_cores
      envs_per_process = var.streams_per_core
    }
    learner = { device = try(var.settings.learner.device, "cuda") } # Without its GPU, the host would cost as much and learn slowly.
    # RAM of the replay server's host in bytes, from which the learner sizes the replay memory. 0: RAM of the learner's host.
    replay = { host_bytes = var.replay_host == "own" ? local.replay_bytes : 0 }
  }

  # What a value of each kind in settings.json must match. Numbers and booleans are not quoted in TOML, all other values are.
  setting_kinds = jsondecode(file("${path.module}/settings.json"))
  patterns      = { int = "-?[0-9]+", float = "-?[0-9]+([.][0-9]+)?(e-?[0-9]+)?", text = ".*" } # otherwise: the values themselves
  wrong_settings = flatten([
    for section, settings in var.settings : [
      for setting, value in settings :
      "${section}.${setting} = ${try(substr(value, 0, 40), "null")} ${try("must be ${local.setting_kinds[section][setting]}", "is not a setting")}"
      if !try(can(regex("^(${lookup(local.patterns, local.setting_kinds[section][setting], local.setting_kinds[section][setting])})$", value)), false)
    ]
  ])

  toml = {
    for role, sections in local.role_settings : role => join("\n", concat(
      role == "learner" ? ["seed = ${var.seed}"] : [],
      flatten([
        for section, settings in sections : concat(
          ["", "[${section}]"],
          [for setting, value in settings : "${setting} = ${try(local.setting_kinds[section][setting], "") != "text" && can(regex("^(true|false|${local.patterns.float})$", value)) ? value : jsonencode(value)}"],
        )
      ]),
      [""],
    ))
  }

  user_data = {
    for kind, host in local.hosts : kind => base64encode(join("\n", ["#cloud-config", yamlencode({
      package_update  = false
      package_upgrade = false
      write_files = concat(
        [{
          path        = "/etc/apex/cluster.env"
          permissions = "0644"
          content = join("", [for key, value in {
            APEX_CLUSTER       = var.name
            APEX_ROLES         = join(",", host.roles)
            APEX_REGION        = local.region
            APEX_BUCKET        = var.bucket
            APEX_BEGUN         = local.run.begun
            APEX_MAX_HOURS     = var.max_hours
            APEX_STALL_MINUTES = var.stall_minutes
          } : "${key}=${value}\n"])
        }],
        [for role in host.roles : { path = "/etc/apex/${role}.toml", permissions = "0644", content = local.toml[role] } if can(local.toml[role])],
      )
      # A role's unit starts the other units that the role needs.
      runcmd = [concat(["systemctl", "enable", "--now", "--no-block"], [for role in host.roles : "apex@${role}.service"])]
    })]))
  }
}
