#!/bin/sh
# A Slurm cluster of one node on this machine, for tests: slurm_cluster.sh install|start|stop FOLDER
#
#   install   installs Debian's packages if they are missing. Prints the reason and exits with 3 if that is not possible.
#   start     starts munged, slurmctld and slurmd with all their files in FOLDER; SLURM_CONF is FOLDER/slurm.conf.
#   stop      ends them, and all jobs.
#
# It needs root, and neither systemd nor cgroups. The node has 4 CPUs and 2 GPUs that do not exist: enough to schedule by.
# Partition high preempts partition low, whose jobs get 120 s to save and are requeued. The machine may be busy: all times
# after which Slurm gives up are long.
set -eu

cannot() { echo "$*"; exit 3; }

install() {
  [ "$(id -u)" = 0 ] || cannot "only root can install and start Slurm"
  for command in munged slurmctld slurmd sbatch; do
    PATH=$PATH:/usr/sbin command -v $command >/dev/null || missing=$command
  done
  [ -n "${missing:-}" ] || return 0
  command -v apt-get >/dev/null || cannot "Slurm is not installed ($missing), and there is no apt-get"
  echo "installing slurm-wlm and munge" >&2
  export DEBIAN_FRONTEND=noninteractive
  packages="apt-get -o DPkg::Lock::Timeout=120 install -qq -y --no-install-recommends slurm-wlm munge"
  $packages >/dev/null 2>&1 || { apt-get update -qq >/dev/null 2>&1 && $packages >/dev/null 2>&1; } ||
    cannot "apt-get could not install slurm-wlm and munge"
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
  mkdir -p "$folder/state" "$folder/spool"
  chmod 700 "$folder"
  name=$(hostname -s)
  set -- $(free_ports)
  (umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")
  cat >"$folder/slurm.conf" <<CONF
ClusterName=tests
SlurmctldHost=$name(127.0.0.1)
SlurmctldPort=$1
SlurmdPort=$2
SlurmUser=root
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
SchedulerParameters=sched_interval=2,batch_sched_delay=1,sched_min_interval=100000
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
  export SLURM_CONF="$folder/slurm.conf" PATH="$PATH:/usr/sbin"
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" 2>"$folder/munged.err" || { cat "$folder/munged.err"; exit 1; }
  slurmctld
  slurmd -N localhost # a name that JAX can resolve on every machine
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
  export SLURM_CONF="$folder/slurm.conf"
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

[ $# -ge 1 ] && [ "$1" = install ] && { install; exit 0; }
[ $# = 2 ] || { echo "usage: slurm_cluster.sh install|start|stop FOLDER" >&2; exit 2; }
folder=$2
case $1 in
  start | stop) "$1" ;;
  *) echo "usage: slurm_cluster.sh install|start|stop FOLDER" >&2; exit 2 ;;
esac
