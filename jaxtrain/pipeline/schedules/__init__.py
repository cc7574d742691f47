"""Pipeline schedules: tables of what each stage does at each tick."""
