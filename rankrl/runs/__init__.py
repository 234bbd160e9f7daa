"""Keep run folders, their locks and records; run `sweeps` of many runs; track each (`tracking`)."""
