"""Face swapping with DeepFaceLab's SAEHD and XSeg: their files, face sets, training, merging and export.

Weights, optimizer state and options of SAEHD, Quick96 and XSeg travel to DeepFaceLab and back bit for bit. Painting
polygons and correcting landmarks by hand stay with DeepFaceLab. Source: DeepFaceLab, master of 46fc239; Perov et al.,
"DeepFaceLab: Integrated, flexible and extensible face-swapping framework", 2020. How to use it: docs/how-to/saehd.md.
"""
