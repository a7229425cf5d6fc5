#!/bin/sh
# Data, YAML files and runs are in this folder, which the container sees as /work.
exec docker run --rm --init --name $name \
    --gpus $gpus --ipc host \
    --ulimit memlock=-1 --ulimit stack=67108864 \
    --stop-timeout $save_seconds \
    --user "$$(id -u):$$(id -g)" --env HOME=/tmp \
    $env \
    --volume "$$PWD:/work" --workdir /work \
    $image $start
