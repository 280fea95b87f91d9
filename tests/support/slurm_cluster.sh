#!/bin/sh
# A Slurm cluster of one node on this machine, for tests: slurm_cluster.sh download|start|stop FOLDER
#
#   download  gets Debian's packages into FOLDER if Slurm is not installed. Prints the reason and exits with 3 if it cannot.
#   start     starts munged, slurmctld and slurmd with all their files in FOLDER, from the packages in $SLURM_PACKAGES if
#             Slurm is not installed. FOLDER/environment sets the variables for its users.
#   stop      ends them, and all jobs.
#
# It needs neither root nor systemd nor cgroups. Packages are unpacked into FOLDER and not installed: no user, service or
# key is left. The node has 4 CPUs and 2 GPUs that do not exist: enough to schedule by. Partition high preempts partition
# low, whose jobs get 120 s to save and are requeued. The machine may be busy: all times after which Slurm gives up are
# long.
set -eu

cannot() { echo "$*"; exit 3; }

find_missing() { # prints a command of Slurm that is not installed
  for command in munged slurmctld slurmd slurmstepd sbatch; do
    PATH=$PATH:/usr/sbin command -v $command >/dev/null || { echo $command; return; }
  done
}

download() {
  missing=$(find_missing)
  [ -n "$missing" ] || return 0
  ! ls "$folder"/slurmctld_*.deb >/dev/null 2>&1 || return 0
  command -v apt-get >/dev/null || cannot "Slurm is not installed ($missing), and there is no apt-get"
  mkdir -p "$folder/partial" "$folder/lists"
  archives=$(cd "$folder" && pwd)
  set -- apt-get -qq -y -o Debug::NoLocking=1 -o "Dir::Cache=$archives" -o "Dir::Cache::archives=$archives" \
    --no-install-recommends --download-only install slurm-wlm munge
  "$@" >/dev/null 2>&1 || { # the machine's package lists may be old
    lists="Dir::State::lists=$archives/lists"
    apt-get -qq -o Debug::NoLocking=1 -o "Dir::Cache=$archives" -o "$lists" update >/dev/null 2>&1 &&
      "$@" -o "$lists" >/dev/null 2>&1
  } || cannot "apt-get could not download slurm-wlm and munge"
}

unpack() { # makes the packages usable from $folder
  for package in "${SLURM_PACKAGES:?is the folder of slurm_cluster.sh download}"/*.deb; do dpkg -x "$package" "$folder/root"; done
  for daemon in slurmctld slurmd slurmstepd; do ln -sf "$daemon-wlm" "$folder/root/usr/sbin/$daemon"; done
  plugins=$(dirname "$(find "$folder/root/usr/lib" -name libslurmfull.so)")
  export PATH="$folder/root/usr/bin:$folder/root/usr/sbin:$PATH" LD_LIBRARY_PATH="${plugins%/*}:$plugins"
}

free_ports() { # two ports that nobody listens on, below those that the system gives to connections
  python3 -c 'import random, socket
sockets = []
while len(sockets) < 2:
    try:
        sockets.append(socket.create_server(("127.0.0.1", random.randrange(20000, 32000))))
    except OSError:
        pass
print(*(s.getsockname()[1] for s in sockets))'
}

start() {
  [ ! -e "$folder/slurmctld.pid" ] || { echo "$folder: a cluster runs there, or was not stopped"; exit 1; }
  mkdir -p "$folder"
  [ "$(stat -c %u "$folder")" = "$(id -u)" ] || { echo "$folder: this folder is another user's"; exit 1; }
  chmod 700 "$folder"
  mkdir -p "$folder/state" "$folder/spool"
  plugins=
  [ -z "$(find_missing)" ] || unpack
  export SLURM_CONF="$folder/slurm.conf" PATH="$PATH:/usr/sbin"
  for name in SLURM_CONF PATH LD_LIBRARY_PATH; do
    eval "value=\${$name:-}"
    [ -z "$value" ] || echo "export $name='$value'"
  done >"$folder/environment"
  name=$(hostname -s)
  set -- $(free_ports)
  (umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")
  cat >"$folder/slurm.conf" <<CONF
ClusterName=tests
SlurmctldHost=$name(127.0.0.1)
SlurmctldPort=$1
SlurmdPort=$2
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
${plugins:+PluginDir=$plugins}
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=60
MessageTimeout=60
BatchStartTimeout=120
MinJobAge=300
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
NodeName=localhost NodeHostname=$name NodeAddr=127.0.0.1 CPUs=4 RealMemory=8000 Gres=gpu:2
PartitionName=low Nodes=localhost Default=YES PriorityTier=1 GraceTime=120 MaxTime=60
PartitionName=high Nodes=localhost PriorityTier=2 PreemptMode=OFF MaxTime=60
CONF
  printf "Name=gpu File=/dev/%s\n" null zero >"$folder/gres.conf" # two files that every machine has
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" 2>"$folder/munged.err" || { cat "$folder/munged.err"; exit 1; }
  slurmctld
  slurmd -N localhost -d "$(command -v slurmstepd)" # a name that JAX can resolve on every machine
  for _ in $(seq 600); do
    if sinfo -h -o %T 2>/dev/null | grep -q idle; then return 0; fi
    sleep 0.1
  done
  echo "the node did not come up:"
  tail -n 20 "$folder/slurmctld.log" "$folder/slurmd.log"
  stop
  exit 1
}

stop() {
  if [ -e "$folder/environment" ]; then . "$folder/environment"; fi
  if [ -e "$folder/slurmctld.pid" ]; then
    timeout 10 scancel --signal=KILL --full --user="$(id -un)" 2>/dev/null || true
    timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
  fi
  for daemon in slurmd slurmctld munged; do
    if [ -e "$folder/$daemon.pid" ]; then
      pid=$(cat "$folder/$daemon.pid")
      kill "$pid" 2>/dev/null || true
      for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
    fi
  done
}

case $#$1 in
  2download | 2start | 2stop) folder=$2 && "$1" ;;
  *) echo "usage: slurm_cluster.sh download|start|stop FOLDER" >&2; exit 2 ;;
esac
