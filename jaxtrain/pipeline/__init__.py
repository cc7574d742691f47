"""Pipeline schedules as tables: made, checked, priced, drawn, and turned into what an executor has to do."""
