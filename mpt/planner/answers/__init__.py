"""The planner's answers, as types: from the process that plans to tables, JSON and its schema. Without torch."""
