"""Face pictures: files, geometry, masks, warps, colour transfer."""
