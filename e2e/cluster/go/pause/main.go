// pause holds namespaces open and reaps orphans: the first process of every pod sandbox, and of the cluster's own pid namespace.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGCHLD, syscall.SIGINT, syscall.SIGTERM)
	for received := range signals {
		if received != syscall.SIGCHLD {
			os.Exit(0)
		}
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if err != syscall.EINTR && (err != nil || pid <= 0) {
				break
			}
		}
	}
}
