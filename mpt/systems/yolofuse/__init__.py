"""Object detection with one or two cameras: YOLOv8 and seven ways to fuse a visible and an infrared picture.

Names, shapes and outputs are those of the published programs (Ultralytics YOLOv8, YOLO11 and YOLO12; YOLOFuse;
DEYOLO). Rotated boxes, segmentation and key points are not there. How to use it: docs/how-to/yolofuse.md.
"""
