"""Where items come from: copied beside utils/ by a script that reads its data with one of these modules.

images_in_memory   a folder or a Hub dataset, decoded into memory once
image_files        image files of any size, decoded and augmented when they are read
image_decoding     image files of any format, decoded to grey or RGB
tar_files          samples in tar files, as webdataset lays them out, in any order
text               documents from a folder, parquet or the Hub, packed into sequences of tokens
hub                a dataset from the Hub, or from a folder of the same form
cache              files that are built once from the data, such as tokens
"""
