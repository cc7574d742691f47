"""The report of a run of islands: what each did, how old its work was, and whom it waited for."""
