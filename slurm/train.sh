#!/bin/bash
# A job that mounts a set on each of its nodes and trains on it (docs/how-to/slurm.md). SHARDS is a path or a URL:
#
#   sbatch slurm/train.sh '/lustre/data/train-{000000..000999}.tar' train.py
#   sbatch slurm/train.sh 's3://bucket/train/train-{000000..000999}.tar' train.py
#
# Credentials of a store stand in ~/.config/wdsfs/config.toml (mode 0600) or in the environment of `sbatch`, never here.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16

export SHARDS=${1:?SHARDS and PROGRAM are missing} PROGRAM=${2:?PROGRAM is missing}
export WDSFS_CACHE_SIZE=${WDSFS_CACHE_SIZE:-200G}      # of what is fetched or unpacked, on each node

srun bash -c '
    tmp=$(mktemp -d)                       # on a disk of the node, made for this user alone
    export WDSFS_INDEX_DIR=$tmp/index      # index and cache
    mnt=$tmp/train && mkdir "$mnt"
    trap "! mountpoint -q $mnt || wdsfs umount $mnt && rm -r --one-file-system $tmp" EXIT
    wdsfs mount --quiet --jobs "$SLURM_CPUS_PER_TASK" "$SHARDS" "$mnt" || exit
    torchrun --nproc-per-node=gpu "$PROGRAM" --data "$mnt"
'
