"""What keeps a run of days from being lost: alarms, pre-emption, skipped updates, and a watchdog for hanging ranks."""
